"""Large messages begin one after another, and the loop is others' in between."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from worker.drain.turns import Turns

STRETCH_S = 0.05


def read_message() -> None:
    """Do what reading a large message does to the loop."""
    time.sleep(STRETCH_S)


async def test_many_large_messages_leave_the_loop_to_others_half_of_the_time() -> None:
    turns, begun = Turns(), list[float]()

    async def read() -> None:
        await turns.wait()
        begun.append(time.monotonic())
        read_message()

    large = [asyncio.create_task(read()) for _ in range(6)]
    others = 0
    while not all(task.done() for task in large):
        before = len(begun)
        await asyncio.sleep(0)
        assert len(begun) - before <= 1
        others += 1
    assert others > 100  # turns of the loop between them, not one for each
    gaps = [later - earlier for earlier, later in pairwise(begun)]
    assert min(gaps) >= 1.9 * STRETCH_S


async def test_the_first_large_message_does_not_wait() -> None:
    first = asyncio.create_task(Turns().wait())
    for _ in range(3):
        await asyncio.sleep(0)
    assert first.done()


async def test_one_that_is_given_up_lets_the_next_begin() -> None:
    turns = Turns()
    waiting = [asyncio.create_task(turns.wait()) for _ in range(3)]
    waiting[1].cancel()
    await asyncio.wait(waiting, timeout=5)
    assert [task.cancelled() for task in waiting] == [False, True, False]
