"""Fixtures of the EMULATED suite, which `make test-rbln` runs in .venv-rbln."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from emulated_npu import COUNT, emulated_env

from demo.stack import MODEL, ROOT

ARTEFACTS = {
    "plain": "--max-seq-len 512 --batch-size 4",
    "buckets": "--max-seq-len 512 --batch-size 4 --buckets 4,2,1",
    "flash": "--max-seq-len 2048 --partition-len 1024 --batch-size 2",
    "devices": "--max-seq-len 512 --batch-size 2 --num-devices 2",
}


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run where the vendor's packages are missing, or the real rebel is there."""
    try:
        version("vllm-rbln")
    except PackageNotFoundError:
        raise pytest.UsageError("tests/rbln runs in its own environment: make test-rbln") from None


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Compile the shipped model in all forms, by the command that users have."""
    folder = tmp_path_factory.mktemp("compiled")
    made = {}
    for name, options in ARTEFACTS.items():
        done = subprocess.run(
            [sys.executable, "-m", "worker.compile", str(MODEL), "-o", str(folder / name),
             "--npu", "RBLN-CA25", "--dtype", "float32", *options.split()],
            cwd=ROOT, env=os.environ | emulated_env(folder), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made[name] = folder / name
    return made


@pytest.fixture(scope="session")
def greedy() -> Any:
    """Return a function: prompts to transformers' own greedy tokens, in a process of its own."""

    def ask(given: Sequence[list[int]], count: int = COUNT) -> list[list[int]]:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests/rbln/greedy.py"), str(MODEL), str(count)],
            input=json.dumps(given), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: list[list[int]] = json.loads(done.stdout)
        return found

    return ask
