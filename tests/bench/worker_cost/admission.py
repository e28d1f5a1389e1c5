"""How requests are admitted to an engine with an RBLN card's scheduling: ours against others.

The same requests of mixed lengths, all waiting from the start, over npu_model.py's engine.
Ours is the whole drain with Redis; the others call the engine directly and pay no queue.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.load import hold, wait_ready
from bench.worker_cost.npu_model import Cost, NpuModelEngine, request

from demo.stack import RedisServer
from worker.drain.drain import Drain
from worker.drain.leases import Leases
from worker.drain.loop import run_drain
from worker.drain.side_tasks import SideTasks
from worker.engine import EngineRequest
from worker.engine.simulated import SimulatedSettings

#: Shapes of cost, not measurements: what a prefill chunk costs beside a decode step, and whether
#: decoding pays for its bucket's rows or for the step alone.
COSTS = {
    "cheap prefill": Cost(prefill_chunk_s=0.002, decode_s=0.008),
    "dear prefill": Cost(prefill_chunk_s=0.016, decode_s=0.008),
    "rows cost": Cost(prefill_chunk_s=0.008, decode_s=0.004, row_s=0.0005),
}
REQUESTS, SEED = 160, 11
TITLE = "admission to an engine with an RBLN card's scheduling (simulated; not an NPU's figures)"
EXPECTED = {
    "written": "before the first run",
    "ours_to_refill_in_groups": 0.95,
    "ours_to_all_at_once": 1.01,
    "ours_to_barrier": 0.65,
    "why": "every policy pays the same prefills; what differs is how many rows are empty while "
    "it decodes. A barrier waits for the longest of each group; groups leave a quarter of "
    "the rows empty; everything at once is the bound, for there a freed row is refilled by the "
    "engine itself, which is what the look-ahead is for",
}
BARS = {"ours_to_refill_in_groups": 1.0, "ours_to_barrier": 1.0}
Policy = Callable[[NpuModelEngine, list[EngineRequest]], Awaitable[None]]


def mixed(count: int, seed: int) -> list[EngineRequest]:
    """Return requests with 16 to 900 prompt tokens and 1 to some 300 answer tokens."""
    draw = random.Random(seed)
    return [
        request(draw.randint(16, 900), max(1, min(300, int(draw.lognormvariate(3.8, 0.8)))))
        for _ in range(count)
    ]


async def _barrier(engine: NpuModelEngine, requests: list[EngineRequest]) -> None:
    """Take a batch, wait for all of it, take the next one."""
    for start in range(0, len(requests), engine.slots):
        await asyncio.gather(*(engine.generate(r, "") for r in requests[start:][: engine.slots]))


async def _in_groups(engine: NpuModelEngine, requests: list[EngineRequest]) -> None:
    """Let decoding go on until half the rows are free, then prefill as many at one go."""
    waiting, running = list(requests), set[asyncio.Task[Any]]()
    while waiting or running:
        free = engine.slots - len(running)
        if waiting and free >= engine.slots // 2:
            running |= {asyncio.create_task(engine.generate(r, "")) for r in waiting[:free]}
            del waiting[:free]
        _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)


async def _all_at_once(engine: NpuModelEngine, requests: list[EngineRequest]) -> None:
    """Give everything to the engine: no priorities, no deadlines, nothing for other workers."""
    await asyncio.gather(*(engine.generate(r, "") for r in requests))


OTHERS: dict[str, Policy] = {
    "barrier": _barrier, "refill_in_groups": _in_groups, "all_at_once": _all_at_once,
}  # fmt: skip


async def _other(cost: Cost, policy: Policy, requests: list[EngineRequest]) -> dict[str, float]:
    engine = NpuModelEngine(cost)
    await engine.start()
    began = time.monotonic()
    await policy(engine, requests)
    took = time.monotonic() - began
    engine.shutdown()
    return {"makespan_s": took, "rows_used": engine.rows / engine.paid}


async def _ours(cost: Cost, folder: Path, requests: list[EngineRequest]) -> dict[str, float]:
    with RedisServer(folder) as server, server.client() as client:
        held = hold(client, "admission", len(requests), lambda n: requests[n - 1].body)
        settings = SimulatedSettings(redis_url=server.url, engine="simulated")
        engine = NpuModelEngine(cost)
        leases = Leases(settings, "admission.1.bench")
        drain = Drain(settings, leases, lambda: engine)
        running = asyncio.create_task(run_drain(drain, SideTasks(drain).tasks()))
        await asyncio.to_thread(wait_ready, client)
        began = held.release()
        ended = await asyncio.to_thread(held.wait)
        drain.stop()
        await running
        await leases.close()
    return {"makespan_s": ended - began, "rows_used": engine.rows / engine.paid}


def measure(quick: bool) -> dict[str, Any]:
    """Run all repeats, interleaved; return the part's figures."""
    requests = mixed(REQUESTS, SEED)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        for repeat in range(1 if quick else 3):
            for shape, cost in COSTS.items():
                found = runs.setdefault(shape, {})
                ours = asyncio.run(_ours(cost, Path(name) / f"{shape}{repeat}", requests))
                found.setdefault("ours", []).append(ours)
                for policy, run_it in OTHERS.items():
                    other = asyncio.run(_other(cost, run_it, requests))
                    found.setdefault(policy, []).append(other)
    reached = {}
    for shape, found in runs.items():
        for policy in OTHERS:
            ratios = [a["makespan_s"] / b["makespan_s"]
                      for a, b in zip(found["ours"], found[policy], strict=True)]  # fmt: skip
            reached[f"ours_to_{policy}, {shape}"] = report.spread(ratios)
        for policy in ("ours", *OTHERS):
            used = [run["rows_used"] for run in found[policy]]
            reached[f"rows used, {policy}, {shape}"] = report.spread(used)
    return {"reached": reached}
