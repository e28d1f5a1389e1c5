"""Carrying a batch's file beside the producer's commands: looked through and queued beside
`producer submit`, its files written beside `producer results`; CPU and wall, in turn.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.load import wait_ready
from bench.common.probe import Probe
from bench.producer_cost.submission import PRODUCER, timed, write_file

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually

TITLE = "carrying beside `producer submit` and `producer results`"
EXPECTED = {
    "written": "after quick runs of another form (0.83 to 0.96)",
    "queued_cpu_ratio": 0.92,
    "written_cpu_ratio": 0.95,
    "why": "a line is read and decoded once more; that its custom_id is new is looked up once",
}
BARS = {"queued_wall_ratio": 0.9, "peak_mb": 200}
SIDE = [sys.executable, str(Path(__file__).with_name("carrying_side.py"))]


def sides(path: Path, folder: Path, *, carried_first: bool) -> dict[str, dict[str, float]]:
    """Queue a file in both ways, drain both batches, and collect one in both ways.

    Returns what each of queued and written took, by carried and producer.
    """
    folder.mkdir()
    env = {
        "WARMQ_GATEWAY_STORE": str(folder / "store"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
    }
    steps = {
        "carried queued": [*SIDE, "look", "two", str(path)],
        "producer queued": [str(PRODUCER), "submit", str(path), "--batch-id", "one"],
        "carried written": [*SIDE, "write", "one"],
        "producer written": [str(PRODUCER), "results", "one", "-o", str(folder / "out.jsonl")],
    }
    names = ("carried", "producer") if carried_first else ("producer", "carried")
    found = {}
    with RedisServer(folder / "redis") as server, server.client() as client:
        store = BatchStore(client, ttl_ms=3_600_000)

        def ended() -> bool:
            return all(batch and batch.finished for batch in store.states(["one", "two"]))

        for what in ("queued", "written"):
            for name in names:
                step = f"{name} {what}"
                found[step] = timed(steps[step], server.url, env=env)
            if what == "queued":
                settings = {"simulated_slots": 256, "simulated_latency_s": 0}
                with Probe(server.url, folder / "seen.json", **settings):
                    wait_ready(client)
                    eventually(ended, 600, "both batches end")
    return found


def measure(quick: bool) -> dict[str, Any]:
    """Run all pairs; return the part's figures. What a process takes to start is taken off: the
    carrier runs already."""
    pairs, lines = (1, 100_000) if quick else (5, 200_000)
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        folder = Path(name)
        path, one = folder / "file.jsonl", folder / "one.jsonl"
        write_file(path, lines)
        write_file(one, 1)
        for number in range(pairs):
            first = number % 2 == 0
            start = sides(one, folder / f"one-{number}", carried_first=first)
            found = sides(path, folder / f"all-{number}", carried_first=first)
            for what in ("queued", "written"):
                for unit in ("cpu", "wall"):
                    took = {
                        name: found[f"{name} {what}"][f"{unit}_s"]
                        - start[f"{name} {what}"][f"{unit}_s"]
                        for name in ("carried", "producer")
                    }
                    ratio = took["producer"] / took["carried"]
                    figures.setdefault(f"{what}_{unit}_ratio", []).append(ratio)
                    us = 1e6 * took["carried"] / lines
                    figures.setdefault(f"{what}_{unit}_us_per_line", []).append(us)
                peak = found[f"carried {what}"]["peak_mb"]
                figures.setdefault("peak_mb", []).append(peak)
    return {
        "lines": lines,
        "reached": {name: report.spread(values) for name, values in figures.items()},
    }
