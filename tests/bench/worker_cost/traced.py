"""What traces cost the worker: off, at one request in a hundred, and with a collector that is away.

Side by side: in each repeat every way runs once, in another order each time, and is divided by the
first `off` of that repeat. `off_again` is the same thing once more: what lies between those two is
noise. Every request is a batch's, as where most of them come from.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.common import report
from bench.worker_cost.overhead import LATENCY_S, STEP_S, worker_cost
from otlp_receiver import otlp_receiver

from demo.stack import free_port

RATIO = 0.01
EXPECTED = {
    "written": "before the first run",
    "full_sampled": 1.0,
    "ceiling_sampled": 0.985,
    "why": "a request that is not sampled costs a checksum of its id, 0.3 us of some 60; a sampled "
    "one about 40 us with its export, so 0.4 us of each",
}
BARS = {"full_sampled": 0.97, "ceiling_sampled": 0.97}
WAYS = ("off", "sampled", "away", "off_again")


@contextmanager
def _told(way: str) -> Iterator[dict[str, Any]]:
    """Yield the worker's settings for a way; exporters are told where to by the environment."""
    if way.startswith("off"):
        yield {}
        return
    with otlp_receiver() as receiver:
        environment = dict(receiver.environment)
        del environment["OTEL_BSP_SCHEDULE_DELAY"]  # as it is by default
        if way == "away":
            environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{free_port()}"
        os.environ.update(environment)
        try:
            yield {"traces": RATIO}
        finally:
            for name in environment:
                del os.environ[name]


def measure(quick: bool) -> dict[str, Any]:
    """Run all repeats; return the part's figures."""
    repeats, full, most = (2, 6000, 10_000) if quick else (6, 6_000, 60_000)
    loads: dict[str, tuple[int, dict[str, float]]] = {
        # 256 in flight, each for 200 ms on average, in an engine that ends them step by step
        "full": (full, {"simulated_latency_s": LATENCY_S, "simulated_step_s": STEP_S}),
        "ceiling": (most, {"simulated_latency_s": 0.0}),
    }
    runs: dict[str, list[dict[str, Any]]] = {f"{k}_{way}": [] for k in loads for way in WAYS}
    averages = [report.load_now()]
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        for repeat in range(repeats):
            at = repeat % len(WAYS)
            for way in (*WAYS[at:], *WAYS[:at]):
                for kind, (count, engine) in loads.items():
                    folder = Path(name) / f"{repeat}-{kind}-{way}"
                    with _told(way) as settings:
                        found = worker_cost(folder, 256, count, **engine, **settings)
                    runs[f"{kind}_{way}"].append(found)
            averages.append(report.load_now())
    return {
        "quick": quick,
        "expected": EXPECTED,
        "bars": BARS,
        "load_average": averages,
        "reached": _reached(runs, tuple(loads)),
        "runs": runs,
    }


def _reached(runs: dict[str, list[dict[str, Any]]], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return rates, and CPU per request, divided by those of `off` in the same repeat."""
    found = {}
    for kind in kinds:
        off = runs[f"{kind}_off"]
        found[f"{kind}_off_per_s"] = report.spread([run["per_s"] for run in off], 0)
        for way in WAYS[1:]:
            pairs = list(zip(runs[f"{kind}_{way}"], off, strict=True))
            rates = [one["per_s"] / other["per_s"] for one, other in pairs]
            found[f"{kind}_{way}"] = report.spread(rates, 3)
            cpu = "worker_us_per_request"
            found[f"{kind}_{way}_cpu"] = report.spread([a[cpu] / b[cpu] for a, b in pairs], 3)
    return found


def run(quick: bool = False) -> None:
    """Measure, save and print."""
    data = measure(quick)
    report.save("traced", data)
    report.figures("traces of the worker, 256 slots, ÷ off", data)
