"""A real Prometheus that scrapes a real run: every panel and rule has an answer (root; apt)."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.chart.expressions import RULES, Expression, of_dashboards, rules
from kit.protocol.lessee import QUEUE
from kit.stacks.eventful import eventful, everything

from demo.stack import ROOT, eventually, free_port

TESTS = Path(__file__).parent / "alerts.yml"


@contextlib.contextmanager
def prometheus(folder: Path, *targets: str) -> Iterator[str]:
    """Run a Prometheus that scrapes these hosts every second; give its URL."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(file) for file in RULES],
        "scrape_configs": [{"job_name": "warmq", "static_configs": [{"targets": [*targets]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    program = shutil.which("prometheus")
    assert program, "no prometheus; `make test-monitoring` installs it"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [program, f"--config.file={folder}/prometheus.yml",
             f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def ask(url: str, path: str, **query: str) -> Any:
    """Return the data of an answer of Prometheus' API, None while it does not answer."""
    try:
        address = f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return None
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    except OSError:
        return None


def numbers(url: str, expression: str) -> list[float]:
    """Return what an expression gives now, what is no number left out."""
    found = ask(url, "query", query=expression) or {"result": []}
    values = [float(each["value"][1]) for each in found["result"]]
    return [value for value in values if math.isfinite(value)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that has seen a run where everything happens (tests/kit/stacks/eventful.py)."""
    folder = tmp_path_factory.mktemp("monitoring")
    with eventful(folder) as run:
        targets = [url.removeprefix("http://") for url in (*run.pages, run.gateway.url)]
        with prometheus(folder, *targets) as url:
            eventually(lambda: len(numbers(url, "warmq_build_info")) == 2, 60, "both are seen", 0.5)
            everything(run)
            yield url


def unbound(expression: str) -> str:
    """Return an alert's expression without its bounds: it has data wherever the alert looks."""
    return re.sub(r"(?<= )(>|<|==)(?= )", r"\1 bool", expression).replace(" unless ", " and ")


@pytest.mark.parametrize("panel", of_dashboards(), ids=[each.where for each in of_dashboards()])
def test_a_panel_shows_numbers(panel: Expression, server: str) -> None:
    eventually(lambda: numbers(server, panel.text), 60, f"{panel.where}: {panel.text}", 0.5)


@pytest.mark.parametrize("name", [each["record"] for each in rules() if "record" in each])
def test_a_recorded_series_has_numbers(name: str, server: str) -> None:
    eventually(lambda: numbers(server, name), 60, name, 0.5)


@pytest.mark.parametrize(
    "alert", [each for each in rules() if "alert" in each], ids=lambda each: each["alert"]
)
def test_what_an_alert_looks_at_is_there(alert: dict[str, Any], server: str) -> None:
    eventually(lambda: numbers(server, unbound(alert["expr"])), 60, alert["alert"], 0.5)


def test_every_rule_is_evaluated_and_those_fire_that_the_run_gave_a_reason(server: str) -> None:
    reasons = {"WarmqNoWorker", "WarmqDeadLettersGrow", "WarmqEngineDies"}

    def told() -> Any:
        groups = (ask(server, "rules") or {"groups": []})["groups"]
        found = {rule["name"]: rule for group in groups for rule in group["rules"]}
        awake = {name for name, rule in found.items() if rule.get("state") in ("pending", "firing")}
        return found if awake >= reasons else None

    found = eventually(told, 60, f"{reasons} are pending", 0.5)
    assert set(found) == {each.get("alert") or each["record"] for each in rules()}
    assert {name: rule["lastError"] for name, rule in found.items() if rule.get("lastError")} == {}
    (alert,) = found["WarmqNoWorker"]["alerts"]
    assert alert["labels"]["queue"] == QUEUE
    quiet = {name for name, rule in found.items() if rule.get("state") == "inactive"}
    assert {"WarmqStalled", "WarmqRedisUnreadable", "WarmqWorkerUnscraped"} <= quiet


def test_promtool_finds_the_rules_right_and_each_alert_fires_when_it_should() -> None:
    for command in (["check", "rules", *map(str, RULES)], ["test", "rules", str(TESTS)]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_for_promtool() -> None:
    cases = yaml.safe_load(TESTS.read_text())["tests"]
    fires = {
        test["alertname"]
        for case in cases
        for test in case["alert_rule_test"]
        if test["exp_alerts"]
    }
    assert fires == {rule["alert"] for rule in rules() if "alert" in rule}
    assert (ROOT / "compose" / "prometheus" / "alerts.yml") in RULES
