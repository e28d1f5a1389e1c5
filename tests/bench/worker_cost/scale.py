"""Many workers on one Redis: how the rate follows their number, and what fills one Redis.

Workers are the drain without Celery over the simulated engine (probe.py). `fleet` runs them at a
latency; `lean` lets processes without an engine (saturate.py) take the real POP and DONE to Redis'
limit, which a model of Redis' CPU per request and per script predicts from runs below it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import redis
from bench.common import report
from bench.common.load import TTL_MS, hold
from bench.common.pace import follow
from bench.common.probe import Probe
from bench.worker_cost.overhead import STEP_S

from contract import naming
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually

SLOTS, LATENCY_S = 256, 0.2
WORKERS = (1, 2, 4, 8, 16)
#: Mean latencies, in seconds, at which sixteen workers stay below what two cores carry.
SLOW_S = (2.0, 4.0)
#: A slow fleet runs for so many latencies, so that its rate no longer shows the common start.
LATENCIES = 5
#: Requests to a script: below Redis' limit with one process, for the model; at it with several.
MODEL_GROUPS, FULL_GROUP, FULL_PROCESSES = (8, 256), 64, 3
TITLE = f"workers of {SLOTS} slots on one Redis, simulated engines, {LATENCY_S:g} s unless said"
EXPECTED = {
    "written": "before the first run, from this machine's overhead figures",
    "share_1": 0.99, "share_2": 0.99, "share_4": 0.98, "share_8": 0.95, "share_16": 0.65,
    "share_16_at_2_s": 0.98, "share_16_at_4_s": 0.98,
    "redis_us_16": 28, "full_at_per_s": 30_000, "full_to_model": 1.0,
    "why": "a worker and its Redis take 155 us a request at 1,200/s and 60 to 70 us when groups "
    "are large, so two cores end at some 14,000/s to 18,000/s; Redis is at half a core then "
    "(16 at 200 ms: 0.406 when each request ended by itself; with steps 0.6 is expected)",
}  # fmt: skip
BARS = {"share_16_at_2_s": 0.95, "share_16_at_4_s": 0.95}
#: What the plot and the page need of each run.
SHOWN = (
    "workers", "latency_s", "ideal_per_s", "per_s", "machine_share", "redis_share",
    "scripts_per_request",
)  # fmt: skip


def fleet(folder: Path, workers: int, latency_s: float, seconds: float) -> dict[str, Any]:
    """Drain a backlog of so many seconds; return its pace and the share of the ideal rate."""
    ideal = workers * SLOTS / latency_s
    # What runs past the measured stretch need not end: a slow engine's tail takes half a minute.
    settings: dict[str, Any] = {
        "simulated_slots": SLOTS, "simulated_latency_s": latency_s, "simulated_step_s": STEP_S,
        "drain_timeout_s": 0.1,
    }  # fmt: skip
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(folder))
        client = stack.enter_context(server.client())
        probes = [
            stack.enter_context(Probe(server.url, folder / f"seen{n}", seed=n, **settings))
            for n in range(workers)
        ]
        store = BatchStore(client, ttl_ms=TTL_MS)
        eventually(lambda: _ready(store) == workers, 180, "all workers are ready")
        held = hold(client, "fleet", int(ideal * seconds))
        found = follow(held, [probe.process.pid for probe in probes])
        for probe in probes:
            probe.process.terminate()
    return found | {
        "workers": workers,
        "latency_s": latency_s,
        "ideal_per_s": ideal,
        "share": found["per_s"] / ideal,
    }


def _ready(store: BatchStore) -> int:
    return sum(worker["state"] == "ready" for worker in store.workers(naming.DEFAULT_QUEUE))


def lean(folder: Path, processes: int, group: int, count: int) -> dict[str, Any]:
    """Let lean processes take `count` requests through POP and DONE, `group` to a script."""
    with RedisServer(folder) as server, server.client() as client:
        held = hold(client, "lean", count)
        command = [sys.executable, str(Path(__file__).with_name("saturate.py")), server.url]
        running = [
            subprocess.Popen([*command, str(group)], stdout=subprocess.PIPE, text=True)
            for _ in range(processes)
        ]
        eventually(lambda: _listening(client) == processes, 60, "all processes wait for requests")
        found = follow(held, [process.pid for process in running])
        written = sum(int(process.communicate(timeout=60)[0]) for process in running)
    if written != count:
        raise RuntimeError(f"{written} results for {count} requests")
    return found | {"processes": processes, "group": group}


def _listening(client: redis.Redis) -> int:
    return int(client.info("clients")["tracking_clients"])


def model(few: dict[str, Any], many: dict[str, Any]) -> tuple[float, float]:
    """Return Redis' microseconds for a request and for a script, from two runs."""
    scripts = few["scripts_per_request"] - many["scripts_per_request"]
    script_us = (few["redis_us_per_request"] - many["redis_us_per_request"]) / scripts
    return many["redis_us_per_request"] - script_us * many["scripts_per_request"], script_us


def measure(quick: bool) -> dict[str, Any]:
    """Run all repeats, interleaved; return the part's figures."""
    repeats, seconds, count, latencies, most = (
        (1, 1.5, 20_000, 3, 4) if quick else (2, 4.0, 100_000, LATENCIES, 16)
    )
    plan = [(n, LATENCY_S, seconds) for n in WORKERS if n <= most]
    plan += [(most, slow, slow * latencies) for slow in SLOW_S]
    fleets: list[dict[str, Any]] = []
    leans: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        folder = Path(name)
        for repeat in range(repeats):
            for run, arguments in enumerate(plan):
                fleets.append(fleet(folder / f"fleet{repeat}-{run}", *arguments))
            for processes, group in (*((1, g) for g in MODEL_GROUPS), (FULL_PROCESSES, FULL_GROUP)):
                path = folder / f"lean{repeat}-{group}"
                leans.append(lean(path, processes, group, count) | {"repeat": repeat})
    return {
        "slots": SLOTS,
        "reached": _of_fleets(fleets) | _of_lean(leans, repeats),
        "fleets": [{name: found[name] for name in SHOWN} for found in fleets],
    }


def _of_fleets(fleets: list[dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for found in fleets:
        slow = "" if found["latency_s"] == LATENCY_S else f"_at_{found['latency_s']:g}_s"
        for name in ("per_s", "share", "redis_share", "machine_share"):
            values.setdefault(f"{name}_{found['workers']}{slow}", []).append(found[name])
        for name in ("redis", "worker"):
            us = found[f"{name}_us_per_request"]
            values.setdefault(f"{name}_us_{found['workers']}{slow}", []).append(us)
    return {
        name: report.spread(found, 3 if "share" in name else 1) for name, found in values.items()
    }


def _of_lean(runs: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for repeat in range(repeats):
        few, many, full = (run for run in runs if run["repeat"] == repeat)
        request_us, script_us = model(few, many)
        us = request_us + script_us * full["scripts_per_request"]
        for name, value in (
            ("model_us_per_request", request_us), ("model_us_per_script", script_us),
            ("model_full_at_per_s", 1e6 / us), ("full_at_per_s", full["per_s"]),
            ("full_redis_share", full["redis_share"]), ("full_to_model", full["per_s"] * us / 1e6),
            ("full_us_to_model", full["redis_us_per_request"] / us),
        ):  # fmt: skip
            values.setdefault(name, []).append(value)
    return {name: report.spread(found, 3 if median(found) < 10 else 1)
            for name, found in values.items()}  # fmt: skip
