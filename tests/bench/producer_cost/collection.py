"""The producer's command line collecting a finished batch: lines per second and peak memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.load import hold, wait_ready
from bench.common.probe import Probe
from bench.producer_cost.submission import PRODUCER, timed

from demo.stack import RedisServer

TITLE = "producer results -o FILE, finished requests, whole command"
EXPECTED = {
    "written": "before the first run",
    "input_lines_per_s": 25_000,
    "input_lines_per_s_1m": 100_000,
    "completion_lines_per_s": 22_000,
    "input_peak_mb": 65,
    "completion_peak_mb": 80,
    "why": "MGET of some hundred results a round trip, decode and encode 10 us, write; in the "
    "order of completion every id goes through the set of those seen; 1,000,000: after two runs by "
    "hand, 104,524 and 116,254",
}
ORDERS = ("input", "completion")
COLLECTED, ONE = "collect", "one"


@contextmanager
def finished(folder: Path, lines: int, *options: str) -> Iterator[str]:
    """Yield the URL of a Redis where the batch COLLECTED has ended, by the simulated engine, and
    one of a single request, ONE."""
    with RedisServer(folder / "redis", *options) as server, server.client() as client:
        settings = {"simulated_slots": 256, "simulated_latency_s": 0}
        with Probe(server.url, folder / "seen.json", **settings):
            wait_ready(client)
            for batch_id, count in ((ONE, 1), (COLLECTED, lines)):
                held = hold(client, batch_id, count)
                held.release()
                held.wait(300)
        yield server.url


def measure(quick: bool) -> dict[str, Any]:
    """Drain one batch with the simulated engine, then collect it again and again."""
    repeats, lines, more = (2, 10_000, 20_000) if quick else (5, 100_000, 1_000_000)
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        out = Path(name) / "out.jsonl"
        with finished(Path(name), lines) as url:
            for _ in range(repeats):
                start_s = timed([str(PRODUCER), "results", ONE, "-o", str(out), "--force"], url)[
                    "wall_s"
                ]
                figures.setdefault("start_s", []).append(start_s)
                for order in ORDERS:
                    command = [str(PRODUCER), "results", COLLECTED, "-o", str(out), "--force"]
                    found = timed([*command, "--order", order], url)
                    with out.open("rb") as file:
                        assert sum(1 for _ in file) == lines
                    rate = lines / found["wall_s"]
                    figures.setdefault(f"{order}_lines_per_s", []).append(rate)
                    steady = lines / (found["wall_s"] - start_s)
                    figures.setdefault(f"{order}_lines_per_s_after_start", []).append(steady)
                    figures.setdefault(f"{order}_peak_mb", []).append(found["peak_mb"])
        with finished(Path(name) / "more", more, "--appendonly", "no") as url:
            for _ in range(2):
                found = timed([str(PRODUCER), "results", COLLECTED, "-o", str(out), "--force"], url)
                figures.setdefault("input_lines_per_s_1m", []).append(more / found["wall_s"])
                figures.setdefault("input_peak_mb_1m", []).append(found["peak_mb"])
                with out.open("rb") as file:
                    assert sum(1 for _ in file) == more
    return {
        "lines": lines,
        "bars": {"input_lines_per_s_after_start": 100_000, "input_lines_per_s_1m": 100_000},
        "reached": {name: report.spread(values, 2) for name, values in figures.items()},
    }
