"""What the queue costs, with the simulated engine in the place of a model.

Slot occupancy comes from the drain in a process of its own (probe.py), which can
look into its engine; CPU, ceiling and Redis figures come from the real worker
process (`celery -A worker.app worker`), seen from outside.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.load import cpu_s, hold, redis_calls, redis_cpu_s, simulated_body, wait_ready
from bench.common.probe import Probe

from contract.openai.body import COMPLETION_URL
from demo.stack import RedisServer, Worker, eventually
from worker.engine import EngineRequest
from worker.engine.simulated.engine import SimulatedEngine

#: Mean latency of the simulated engine in seconds; lognormal with sigma 0.5.
LATENCY_S = 0.2
#: An engine ends requests at the end of a step. vLLM's steps on an H200 took 9 ms with a 1B model
#: and 26 ms with an 8B model at 256 slots (results/gpu-*.json).
STEP_S = 0.01
#: As many in flight at four times the rate: what a wake-up costs is shared by more requests.
BRISK_S = 0.05
TITLE = "queue overhead, simulated engine, 200 ms mean latency"
EXPECTED = {
    "written": "before the first run, from facts/celery-redis.md section 2 (the prototype)",
    "occupancy_64": 0.998,
    "occupancy_256": 0.99,
    "ceiling_per_s": 4500,
    "worker_us_per_request": 170,
    "stepped_worker_us_per_request": 85,
    "redis_us_per_request": 60,
    "why": "the prototype had 97-111 us and 34-40 us; added since: body validation, batch "
    "counters, fresh lease ids, a worker hash instead of kombu's; in steps: a tenth of the "
    "wake-ups, and 42 at the ceiling",
}
BARS = {
    "occupancy_64": 0.98,
    "occupancy_256": 0.98,
    "ceiling_per_s": 10_000,
    "worker_us_per_request": 100,
    "stepped_worker_us_per_request": 100,
    "scripts_per_request": 0.125,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: repeats, seconds of backlog, requests for the ceiling."""

    repeats: int
    backlog_s: float
    ceiling: int


FLOOR = Path(__file__).with_name("floor.py")
FULL = Sizes(5, 10, 40_000)
QUICK = Sizes(2, 3, 8_000)


def occupancy(folder: Path, slots: int, backlog_s: float) -> dict[str, Any]:
    """Return the share of slot-seconds used from the first POP to the last one."""
    count = int(slots / LATENCY_S * backlog_s)
    with RedisServer(folder) as server, server.client() as client:
        settings = {"simulated_slots": slots, "simulated_latency_s": LATENCY_S}
        with Probe(server.url, folder / "seen.json", **settings) as probe:
            wait_ready(client)
            held = hold(client, "occupancy", count)
            began = held.release()
            ended = held.wait()
    del probe.seen["came"]
    return probe.seen | {"slots": slots, "per_s": count / (ended - began)}


def worker_cost(folder: Path, slots: int, count: int, **settings: float) -> dict[str, Any]:
    """Return what `count` requests cost the real worker process and Redis; `settings` are the
    simulated engine's."""
    with RedisServer(folder) as server, server.client() as client:
        settings |= {"simulated_slots": slots}
        log = folder / "worker.log"
        with Worker(server.url, log, engine="simulated", **settings) as worker:
            assert worker.process is not None
            wait_ready(client)
            held = hold(client, "cost", count)
            idle_us = _idle_us(worker.process.pid)
            client.config_resetstat()
            cpu, redis_cpu = cpu_s(worker.process.pid), redis_cpu_s(client)
            began = held.release()
            ended = held.wait()
            cpu, redis_cpu = cpu_s(worker.process.pid) - cpu, redis_cpu_s(client) - redis_cpu
            calls = redis_calls(client)
    return {
        "slots": slots,
        "per_s": count / (ended - began),
        "worker_us_per_request": 1e6 * cpu / count,
        "redis_us_per_request": 1e6 * redis_cpu / count,
        "commands_per_request": sum(calls.values()) / count,
        "scripts_per_request": calls.get("evalsha", 0) / count,
        "worker_idle_us_per_s": idle_us,
        "calls": calls,
    }


def engine_alone_us(slots: int, count: int, step_s: float) -> float:
    """Return CPU microseconds a request costs the simulated engine itself, without any queue."""

    async def work() -> float:
        engine = SimulatedEngine(slots, LATENCY_S, step_s=step_s)
        await engine.start()
        numbers = list(range(count))

        async def keep_going() -> None:
            while numbers:
                body = simulated_body(numbers.pop())
                await engine.generate(EngineRequest(COMPLETION_URL, body), body["prompt"])

        before = time.process_time()
        await asyncio.gather(*(keep_going() for _ in range(slots)))
        return time.process_time() - before

    return 1e6 * asyncio.run(work()) / count


def floor_us(folder: Path, slots: int, count: int, step_s: float) -> float:
    """Return CPU microseconds a request costs the least loop there is (floor.py)."""
    with RedisServer(folder) as server, server.client() as client:
        held = hold(client, "floor", count)
        words = [held.list_key, slots, LATENCY_S, step_s, count]
        command = [sys.executable, FLOOR, server.url, *words]
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE) as process:
            eventually(lambda: client.info("clients")["blocked_clients"], 60, "it waits")
            held.release()
            out, _ = process.communicate(timeout=120)
    return float(json.loads(out))


def _idle_us(pid: int, seconds: float = 2.0) -> float:
    """Return CPU microseconds per second of a worker that has nothing to do."""
    before = cpu_s(pid)
    time.sleep(seconds)
    return 1e6 * (cpu_s(pid) - before) / seconds


def measure(quick: bool) -> dict[str, Any]:
    """Run all repeats, interleaved; return the part's figures."""
    sizes = QUICK if quick else FULL
    kinds = ("64", "256", "cost", "stepped", "brisk", "ceiling")
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    alone: dict[str, list[float]] = {"": [], "stepped_": []}
    floor: dict[str, list[float]] = {"": [], "stepped_": []}
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        for repeat in range(sizes.repeats):
            folder = Path(name) / str(repeat)
            for slots in (64, 256):
                found = occupancy(folder / str(slots), slots, sizes.backlog_s)
                runs[str(slots)].append(found)
            count = int(256 / LATENCY_S * sizes.backlog_s)
            engine = {"simulated_latency_s": LATENCY_S}
            runs["cost"].append(worker_cost(folder / "cost", 256, count, **engine))
            engine["simulated_step_s"] = STEP_S
            runs["stepped"].append(worker_cost(folder / "stepped", 256, count, **engine))
            brisk = engine | {"simulated_latency_s": BRISK_S}
            runs["brisk"].append(worker_cost(folder / "brisk", 256, 3 * count, **brisk))
            for kind, step_s in (("", 0), ("stepped_", STEP_S)):
                alone[kind].append(engine_alone_us(256, count // 2, step_s))
                floor[kind].append(floor_us(folder / f"{kind}floor", 256, count, step_s))
            engine = {"simulated_latency_s": 0}
            runs["ceiling"].append(worker_cost(folder / "ceiling", 256, sizes.ceiling, **engine))
    return {
        "reached": _reached(runs)
        | {f"{n}engine_alone_us_per_request": report.spread(us, 1) for n, us in alone.items()}
        | {f"{n}floor_us_per_request": report.spread(us, 1) for n, us in floor.items()}
        | {
            f"{n}worker_to_floor": _over_floor(runs[k], us)
            for k, (n, us) in zip(("cost", "stepped"), floor.items(), strict=True)
        },
    }


def _over_floor(runs: list[dict[str, Any]], floor: list[float]) -> dict[str, Any]:
    return report.spread(
        [run["worker_us_per_request"] / us for run, us in zip(runs, floor, strict=True)], 2
    )


def _reached(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def over(kind: str, figure: str, digits: int) -> dict[str, Any]:
        return report.spread([run[figure] for run in runs[kind]], digits)

    return {
        "occupancy_64": over("64", "occupancy", 4),
        "occupancy_256": over("256", "occupancy", 4),
        "ceiling_per_s": over("ceiling", "per_s", 0),
        "worker_us_per_request": over("cost", "worker_us_per_request", 1),
        "stepped_worker_us_per_request": over("stepped", "worker_us_per_request", 1),
        "stepped_scripts_per_request": over("stepped", "scripts_per_request", 3),
        "brisk_worker_us_per_request": over("brisk", "worker_us_per_request", 1),
        "brisk_per_s": over("brisk", "per_s", 0),
        "redis_us_per_request": over("cost", "redis_us_per_request", 1),
        "commands_per_request": over("cost", "commands_per_request", 2),
        "scripts_per_request": over("cost", "scripts_per_request", 3),
        "ceiling_worker_us_per_request": over("ceiling", "worker_us_per_request", 1),
        "ceiling_redis_us_per_request": over("ceiling", "redis_us_per_request", 1),
        "worker_idle_us_per_s": over("cost", "worker_idle_us_per_s", 0),
    }
