"""What traces cost the worker: off, at one request in a hundred, and with a collector that is away.

At 256 slots that are full: worker processes, one of each way in each repeat, divided by the first
`off` of that repeat. `off_again` is the same thing once more: what lies between those two is noise.

At the ceiling that noise is a third. There one drain serves short batches with traces and without,
in turn (on, off, off, on), and each is divided by its neighbour: whatever else the machine does,
both have it. Every request is a batch's, as where most of them come from.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from bench.common import report
from bench.common.load import hold
from bench.worker_cost.overhead import LATENCY_S, STEP_S, worker_cost
from kit.drain.draining import draining, soon

from contract.traces import tracing
from demo.stack import RedisServer, free_port
from worker.drain.events import Committed, HandedBack, Leased, LeasesLost
from worker.telemetry.traces import Traces

RATIO = 0.01
TITLE = "traces of the worker, 256 slots, ÷ off"
EXPECTED = {
    "written": "before the first run",
    "full_sampled": 1.0,
    "ceiling_sampled": 0.985,
    "why": "a request that is not sampled costs a checksum of its id, 0.3 us of some 60; a sampled "
    "one about 40 us with its export, so 0.4 us of each",
}
BARS = {"full_sampled": 0.97, "ceiling_sampled": 0.97}
WAYS = ("off", "sampled", "away", "off_again")
RECEIVER = (
    "import json, sys; from kit.servers.otlp_receiver import otlp_receiver\n"
    "with otlp_receiver() as it: print(json.dumps(it.environment), flush=True); sys.stdin.read()"
)


@contextmanager
def _collector(*, there: bool = True) -> Iterator[None]:
    """Receive spans in a process of its own; exporters are told where by the environment."""
    command = [sys.executable, "-c", RECEIVER]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdout is not None
        environment = json.loads(process.stdout.readline())
        del environment["OTEL_BSP_SCHEDULE_DELAY"]  # as it is by default
        if not there:
            environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{free_port()}"
        os.environ.update(environment)
        try:
            yield
        finally:
            for name in environment:
                del os.environ[name]
            process.communicate("")


def _full(folder: Path, way: str, count: int) -> dict[str, Any]:
    """256 in flight, each for 200 ms on average, in an engine that ends them step by step."""
    engine = {"simulated_latency_s": LATENCY_S, "simulated_step_s": STEP_S}
    if way.startswith("off"):
        return worker_cost(folder, 256, count, **engine)
    with _collector(there=way == "sampled"):
        return worker_cost(folder, 256, count, **engine, traces=RATIO)


async def _alternate(url: str, client: redis.Redis, pairs: int, count: int) -> list[dict[str, Any]]:
    """Return for each pair how long, and how much CPU, a batch took with traces and without."""
    found = []
    with tracing(RATIO, "bench") as tracer:
        assert tracer is not None
        async with draining(url, simulated_slots=256, simulated_latency_s=0.0) as running:
            traces, events = Traces(running.drain, tracer), running.drain.events
            heard = (
                (Leased, traces._leased), (Committed, traces._committed),
                (HandedBack, traces._handed_back), (LeasesLost, traces._lost),
            )  # fmt: skip
            for kind, listener in heard:
                events.unsubscribe(kind, listener)
            for pair in range(-1, pairs):  # the first one warms everything up
                took: dict[str, Any] = {}
                for way in ("on", "off")[:: 1 if pair % 2 else -1]:
                    for kind, listener in heard if way == "on" else ():
                        events.subscribe(kind, listener)
                    held = hold(client, f"{pair}-{way}", count)
                    cpu, began = time.process_time(), time.perf_counter()
                    held.release()
                    await soon(held.finished_at, 60, "the batch ends")
                    took[f"{way}_s"] = time.perf_counter() - began
                    took[f"{way}_cpu_s"] = time.process_time() - cpu
                    for kind, listener in heard if way == "on" else ():
                        events.unsubscribe(kind, listener)
                found.append(took)
    return found[1:]


def measure(quick: bool) -> dict[str, Any]:
    """Run all repeats; return the part's figures."""
    repeats, count, pairs = (1, 3000, 8) if quick else (5, 6000, 40)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        with (
            RedisServer(Path(name) / "ceiling") as server,
            server.client() as client,
            _collector(),
        ):
            alternated = asyncio.run(_alternate(server.url, client, pairs, 10_000))
        for repeat in range(repeats):
            for way in report.in_turn(WAYS, repeat):
                runs[way].append(_full(Path(name) / f"{repeat}-{way}", way, count))
    return {
        "reached": _reached(runs, alternated),
    }


def _reached(
    runs: dict[str, list[dict[str, Any]]], alternated: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return rates, and CPU per request, divided by those of `off` beside them."""
    found = {"full_off_per_s": report.spread([run["per_s"] for run in runs["off"]], 0)}
    for way in WAYS[1:]:
        pairs = list(zip(runs[way], runs["off"], strict=True))
        found[f"full_{way}"] = report.spread([a["per_s"] / b["per_s"] for a, b in pairs])
        cpu = "worker_us_per_request"
        found[f"full_{way}_cpu"] = report.spread([a[cpu] / b[cpu] for a, b in pairs])
    found["ceiling_sampled"] = report.spread([one["off_s"] / one["on_s"] for one in alternated])
    found["ceiling_sampled_cpu"] = report.spread(
        [one["on_cpu_s"] / one["off_cpu_s"] for one in alternated]
    )
    return found
