"""Requests in flight: what an abort reaches, and which may be in the engine's slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.message import MessageWriter, read_delivery
from contract.naming import PRIORITY_STEPS
from worker.drain.in_flight import InFlight, Running, perhaps_inside


async def test_an_abort_reaches_a_request_whose_task_has_not_begun() -> None:
    # Given a request that was admitted a moment ago: a task that is cancelled now would end
    # before its first line, and nobody would give the request an ending
    message = MessageWriter("b", 1, "life", "warmq", 6).write(
        "id", "c", 1, "/v1/completions", b"{}"
    )
    in_flight, seen = InFlight(), []
    running = in_flight.add(read_delivery("w/1", message))

    async def serve() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(running.abort)

    running.task = asyncio.create_task(serve())
    in_flight.abort([running], "cancelled")
    await asyncio.wait([running.task])
    assert seen == ["cancelled"]


# -- the engine's slots ------------------------------------------------------------------------


def request(number: int, priority: int) -> Running:
    """Return a request in flight whose lease has this number."""
    message = MessageWriter("b", 1, "life", "warmq", priority).write(
        f"id{number}", "c", 1, "/v1/completions", b"{}"
    )
    return Running(read_delivery(f"w/{number}", message), f"id{number}")


@pytest.mark.parametrize(
    ("priorities", "slots", "inside"),
    [
        ([6] * 6, 4, [0, 1, 2, 3]),
        ([6] * 6 + [0], 4, [0, 1, 2, 3, 6]),
        ([0] * 4 + [6] * 2, 4, [0, 1, 2, 3]),
        ([9, 9, 6, 6, 3, 0, 0, 0], 2, [0, 1, 2, 3, 4, 5, 6]),
        ([6, 6], 4, [0, 1]),
        ([6, 6], 0, []),
    ],
)
def test_one_that_as_many_as_there_are_slots_precede_has_not_started(
    priorities: list[int], slots: int, inside: list[int]
) -> None:
    which = [request(number, priority) for number, priority in enumerate(priorities)]
    assert perhaps_inside(which, slots) == [which[number] for number in inside]


def by_priority(running: Running) -> tuple[int, int]:
    return running.delivery.priority, int(running.engine_id[2:])


def by_arrival(running: Running) -> int:
    return int(running.engine_id[2:])


@pytest.mark.parametrize("order", [by_priority, by_arrival])
@given(
    slots=st.integers(1, 4),
    steps=st.lists(st.sampled_from(PRIORITY_STEPS) | st.integers(10, 13), max_size=60),
)
def test_what_is_in_a_slot_is_always_among_them(
    order: Callable[[Running], int], slots: int, steps: list[int]
) -> None:
    # Given an engine that starts what waits in this order, and requests that come and end
    waiting: list[Running] = []
    slotted: list[Running] = []
    for number, step in enumerate(steps):
        if step < 10:
            waiting.append(request(number, step))
        elif slotted:
            del slotted[step % len(slotted)]
        waiting.sort(key=order)
        while waiting and len(slotted) < slots:
            slotted.append(waiting.pop(0))
        # Then what runs is known to be able to run
        which = sorted(waiting + slotted, key=by_arrival)
        perhaps = perhaps_inside(which, slots)
        assert {r.engine_id for r in slotted} <= {r.engine_id for r in perhaps}
