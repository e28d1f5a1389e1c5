"""The simulated engine's steps: benchmarks count on requests that end together."""

from __future__ import annotations

import asyncio

from contract.body import COMPLETION_URL
from worker.engine import EngineRequest
from worker.engine.simulated import SimulatedEngine


async def passes_of_ends(step_s: float) -> list[int]:
    """Return in which pass of the loop each of four requests of 1 to 4 ms ended."""
    loop = asyncio.get_running_loop()
    engine = SimulatedEngine(4, 1.0, step_s=step_s)
    await engine.start()
    passes = 0

    def count() -> None:
        nonlocal passes, counting
        passes += 1
        counting = loop.call_soon(count)

    async def end(ms: int) -> int:
        body = {"prompt": "p", "user": f"simulate:sleep={ms / 1000}"}
        await engine.generate(EngineRequest(COMPLETION_URL, body), f"r{ms}")
        return passes

    counting = loop.call_soon(count)
    try:
        return await asyncio.gather(*(end(ms) for ms in (1, 2, 3, 4)))
    finally:
        counting.cancel()


async def test_requests_of_one_step_end_together() -> None:
    assert len(set(await passes_of_ends(0.1))) <= 2  # a step may end between the four


async def test_without_steps_each_request_ends_by_itself() -> None:
    assert len(set(await passes_of_ends(0))) == 4
