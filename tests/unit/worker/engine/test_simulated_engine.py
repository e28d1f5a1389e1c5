"""The simulated engine's steps: benchmarks count on requests that end together."""

from __future__ import annotations

import asyncio

import pytest

from contract.openai.body import COMPLETION_URL
from worker.engine import EngineRequest
from worker.engine.simulated.engine import SimulatedEngine


async def passes_of_ends(monkeypatch: pytest.MonkeyPatch, step_s: float) -> list[int]:
    """Return in which pass of the loop each of four requests of 1 to 4 ms ended.

    The loop's clock goes on by half a millisecond a pass, however long a pass takes.
    """
    loop = asyncio.get_running_loop()
    passes = 0

    def count() -> None:
        nonlocal passes, counting
        passes += 1
        counting = loop.call_soon(count)

    async def end(ms: int) -> int:
        body = {"prompt": "p", "user": f"simulate:sleep={ms / 1000}"}
        await engine.generate(EngineRequest(COMPLETION_URL, body), f"r{ms}")
        return passes

    monkeypatch.setattr(loop, "time", lambda: 1.06 + passes * 0.0005)
    engine = SimulatedEngine(4, 1.0, step_s=step_s)
    await engine.start()
    counting = loop.call_soon(count)
    try:
        return await asyncio.gather(*(end(ms) for ms in (1, 2, 3, 4)))
    finally:
        counting.cancel()
        monkeypatch.undo()


async def test_requests_of_one_step_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(set(await passes_of_ends(monkeypatch, 0.1))) == 1


async def test_without_steps_each_request_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(set(await passes_of_ends(monkeypatch, 0))) == 4
