"""Engines that need no server and no vLLM keep what the drain relies on.

tests/kit/engines/conformance.py has the checks.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.commands.support import producer_env
from kit.engines.conformance import conform

from demo.stack import MODEL, ROOT

pytestmark = pytest.mark.timeout(240)


def test_the_simulated_engine_conforms(tmp_path: Path) -> None:
    conform(
        tmp_path, engine="simulated", simulated_slots=4, simulated_latency_s=0.05,
        simulated_process=True,
    )  # fmt: skip


def documented(folder: Path) -> str:
    """Install the demo's engine as docs/how-to/adding-an-engine.md says; return its source."""
    page = (ROOT / "docs/how-to/adding-an-engine.md").read_text()
    source = (ROOT / "demo/transformers_engine.py").read_text()
    (folder / "transformers_engine.py").write_text(source)
    info = folder / "transformers_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers-engine\nVersion: 1.0")
    (name,) = re.findall(r'^\[project.entry-points."(.*)"\]$', page, re.MULTILINE)
    (target,) = re.findall(r'^transformers = "(.*)"$', page, re.MULTILINE)
    (info / "entry_points.txt").write_text(f"[{name}]\ntransformers = {target}\n")
    return source


def test_the_documented_engine_conforms_without_a_change_outside_its_file(tmp_path: Path) -> None:
    assert len(documented(tmp_path).splitlines()) <= 120
    conform(
        tmp_path, engine="transformers", model=MODEL, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip


def test_the_documented_engine_is_made_and_shut_down_by_the_check_without_being_built(
    tmp_path: Path, redis_url: str
) -> None:
    documented(tmp_path)
    settings = {"WARMQ_ENGINE": "transformers", "WARMQ_MODEL": str(MODEL)}
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "WARMQ_TRANSFORMERS_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "worker.check"], cwd=ROOT, text=True, capture_output=True,
        env=producer_env(redis_url, **settings, **path), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.endswith("No problems found.\n")
