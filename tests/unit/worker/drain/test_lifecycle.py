"""What a worker is doing, from its start to its end."""

from __future__ import annotations

import asyncio
import math

import pytest

from worker.drain.lifecycle import HURRY_S, Lifecycle, State


class Writes:
    """Stands where the writes to Redis are: notes for how long they may be tried."""

    def __init__(self) -> None:
        self.given_up_in: list[float] = []


@pytest.fixture
def writes() -> Writes:
    return Writes()


@pytest.fixture
def lifecycle(writes: Writes) -> Lifecycle:
    return Lifecycle(20.0, writes.given_up_in.append)


async def test_a_worker_is_ready_while_its_engine_is_and_degraded_while_it_is_replaced(
    lifecycle: Lifecycle,
) -> None:
    seen = [lifecycle.state]
    for note in (lifecycle.engine_ready, lifecycle.engine_dead, lifecycle.engine_ready):
        note()
        seen.append(lifecycle.state)
    assert seen == [State.STARTING, State.READY, State.DEGRADED, State.READY]


async def test_a_worker_that_stops_does_not_become_ready_again(lifecycle: Lifecycle) -> None:
    lifecycle.stop()
    lifecycle.engine_ready()
    lifecycle.engine_dead()
    assert lifecycle.state is State.DRAINING
    lifecycle.stopped()
    assert lifecycle.state is State.STOPPED


async def test_a_stop_gives_the_writes_the_drain_timeout_and_a_hurry_less(
    lifecycle: Lifecycle, writes: Writes
) -> None:
    lifecycle.stop()
    lifecycle.stop()
    assert writes.given_up_in == [20.0 + HURRY_S]
    lifecycle.hurry()
    lifecycle.hurry()
    assert writes.given_up_in == [20.0 + HURRY_S, HURRY_S]


async def test_work_ends_when_a_stop_is_asked_for_and_a_stop_when_it_is_hurried(
    lifecycle: Lifecycle,
) -> None:
    working = asyncio.create_task(lifecycle.until_asked(asyncio.sleep(math.inf)))
    finishing = asyncio.create_task(lifecycle.until_hurried(asyncio.sleep(math.inf)))
    assert await lifecycle.until_asked(asyncio.sleep(0))
    lifecycle.stop()
    assert not await working
    assert not finishing.done()
    lifecycle.hurry()
    assert not await finishing
