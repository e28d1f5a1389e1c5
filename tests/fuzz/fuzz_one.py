"""One fuzzing process: `fuzz_one.py TARGET libFuzzer-options... FOLDER...`; started by run.py."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

with atheris.instrument_imports(include=["contract", "gateway", "producer", "worker"]):
    from fuzz.targets import TARGETS

atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
atheris.Fuzz()
