"""The simulated engine: requests that end together, and which of those that wait begins."""

from __future__ import annotations

import asyncio

import pytest

from contract.openai.body import COMPLETION_URL
from worker.engine import EngineRequest
from worker.engine.simulated.engine import SimulatedEngine
from worker.engine.simulated.slots import Slots


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


async def test_those_that_wait_begin_by_priority_then_as_they_came() -> None:
    engine, order = SimulatedEngine(1, 0.0), list[str]()
    await engine.start()

    async def run(name: str, priority: int) -> None:
        request = EngineRequest(COMPLETION_URL, {"prompt": name}, priority=priority)
        await engine.generate(request, name)
        order.append(name)

    came = {"first": 6, "second": 6, "last": 9, "flex": 3, "online": 0, "later": 0}
    await asyncio.gather(*(run(name, priority) for name, priority in came.items()))
    assert order == ["first", "online", "later", "flex", "second", "last"]


async def test_a_slot_of_one_that_gives_up_is_the_next_ones() -> None:
    slots = Slots(1)
    await slots.take(6)
    waiting = [asyncio.create_task(slots.take(priority)) for priority in (6, 0, 3)]
    await asyncio.sleep(0)
    waiting[1].cancel()  # while it waits
    await asyncio.sleep(0)
    slots.give()
    waiting[2].cancel()  # just as it has got the slot
    await asyncio.wait(waiting, timeout=5)
    assert [task.cancelled() for task in waiting] == [False, True, True]
    slots.give()
    async with asyncio.timeout(5):
        await slots.take(9)
