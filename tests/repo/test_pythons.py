"""The Pythons that warmq supports: every place that lists them lists the same ones."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

from demo.stack import ROOT

SETUP = (ROOT / "scripts" / "setup").read_text()
VERSION = re.compile(r"3\.\d+")


def supported() -> list[str]:
    """Return the Pythons of the classifiers, oldest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [line.rpartition(" ")[2] for line in project["classifiers"] if ":: Python ::" in line]


def refusal(tmp_path: Path, *sets: str, **environment: str) -> str:
    """Return what set-up says, which must end without making an environment."""
    done = subprocess.run(
        [ROOT / "scripts" / "setup", *sets],
        env=os.environ | {"VENV": str(tmp_path / "venv")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert not (tmp_path / "venv" / "bin").exists()
    return done.stderr


def test_the_range_begins_and_ends_with_the_classifiers() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    minors = [int(version.partition(".")[2]) for version in supported()]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert wanted == f">=3.{minors[0]},<3.{minors[-1] + 1}"


def test_set_up_the_locks_and_the_workflow_know_the_same_pythons() -> None:
    default = re.search(r"^pythons=\$\{PYTHONS:-(.*)\}$", SETUP, re.MULTILINE)
    assert default
    assert default.group(1).split() == supported()
    lock = (ROOT / "scripts" / "lock").read_text()
    places = re.search(r"product\(\s*\((.*?)\)", lock, re.DOTALL)
    assert places
    assert sorted(set(VERSION.findall(places.group(1)))) == supported()
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrices = re.findall(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    assert [version for row in matrices for version in VERSION.findall(row)] == supported()


def test_a_named_python_that_does_not_fit_is_refused_in_words(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    said = refusal(tmp_path, "base", PYTHON=str(old))
    assert f"PYTHON={old}: for base a Python 3.11, 3.12, 3.13 or 3.14 that runs here" in said
    assert "Traceback" not in said


def test_packages_that_stop_at_312_are_refused_on_a_later_python(tmp_path: Path) -> None:
    later = tmp_path / "python3.13"
    later.write_text("#!/bin/sh\necho 3.13\n")
    later.chmod(0o755)
    said = refusal(tmp_path, "base", "triton", PYTHON=str(later))
    assert "for base triton a Python 3.11 or 3.12 that runs here is needed" in said
