"""How much a worker takes at once, and who waits for whom."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest

from contract.openai.amounts import sequences_of
from worker.drain.admission import AdmissionLimits, LargeMessages, SequenceLimit
from worker.engine import Capacity, multi_sequence_slots
from worker.settings import WorkerSettings


def room(*, one_step: bool, **given: int) -> AdmissionLimits:
    settings = WorkerSettings(redis_url="redis://x", **given)
    return AdmissionLimits.of(Capacity(256, 1024, "m", one_step=one_step), settings)


def test_a_quarter_of_the_slots_waits_where_requests_end_one_by_one() -> None:
    assert room(one_step=False) == AdmissionLimits(256, 320, 32, 8, context=1024)


def test_two_steps_wait_where_all_slots_are_free_at_once() -> None:
    assert room(one_step=True) == AdmissionLimits(256, 768, 256, 8, one_step=True, context=1024)


@pytest.mark.parametrize("one_step", [False, True])
def test_what_is_set_holds_for_both(one_step: bool) -> None:
    assert room(one_step=one_step, look_ahead=16).limit == 272


@pytest.mark.parametrize(("look_ahead", "places"), [(0, 0), (3, 0), (8, 2), (64, 8)])
def test_few_places_are_reserved_for_online_requests(look_ahead: int, places: int) -> None:
    assert room(one_step=False, look_ahead=look_ahead).reserved == places


@pytest.mark.parametrize(("slots", "places"), [(1, 1), (2, 1), (4, 3), (32, 30), (256, 240)])
def test_requests_of_many_sequences_leave_slots_to_others(slots: int, places: int) -> None:
    assert multi_sequence_slots(slots) == places
    assert AdmissionLimits(slots, slots + 8).multi_sequence_slots == places


def test_a_quarter_of_those_that_wait_may_be_of_many_sequences() -> None:
    assert room(one_step=False).multi_sequence_waiting == 16
    assert AdmissionLimits(32, 32).multi_sequence_waiting == 1


# -- requests of many sequences ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, 1),
        ({"messages": [], "n": 128}, 128),
        ({"messages": [], "n": None}, 1),
        ({"prompt": "a", "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"input": ["a"] * 1024}, 1024),
        ({"input": [{"role": "user", "content": "a"}] * 3}, 1),
        ({"query": "a", "documents": ["b", "c"]}, 2),
        ({"prompt": []}, 1),
        ({"messages": [[{"role": "user", "content": "a"}]] * 3}, 3),
        ({"messages": [], "documents": [{"text": "a"}, {"text": "b"}]}, 1),
        ({"text_1": "a", "text_2": ["b", "c"]}, 2),
        ({"queries": "a", "items": ["b", "c", "d"]}, 3),
        ({"data_1": "a", "data_2": {"content": [{"text": "a"}, {"text": "b"}]}}, 2),
        ({"prompt": ["a"], "prompt_embeds": ["b", "c"]}, 3),
    ],
)
def test_a_request_is_n_times_its_prompts(body: dict[str, Any], count: int) -> None:
    assert sequences_of(body) == count


async def most_inside(limit: int, counts: list[int]) -> tuple[int, list[int]]:
    """Run requests of so many sequences; return the most inside at once, and the order of entry."""
    gate = SequenceLimit(lambda: limit)
    inside, most, order = 0, 0, []

    async def one(count: int) -> None:
        nonlocal inside, most
        async with gate.entered(count):
            order.append(count)
            inside += count
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= count

    await asyncio.gather(*(one(count) for count in counts))
    return most, order


def test_the_sum_is_bounded_and_one_larger_than_the_limit_runs_apart() -> None:
    most, order = asyncio.run(most_inside(16, [8, 8, 8, 128, 2]))
    assert most == 128
    assert order == [8, 8, 8, 128, 2]
    assert asyncio.run(most_inside(16, [8, 8, 8, 4, 12]))[0] <= 16


async def test_those_that_wait_enter_by_priority_then_as_they_came() -> None:
    gate, order, go_on = SequenceLimit(lambda: 4), list[str](), asyncio.Event()

    async def one(name: str, priority: int) -> None:
        async with gate.entered(4, priority):
            order.append(name)
            await go_on.wait()

    came = [("first", 6), ("second", 6), ("flex", 3), ("third", 6), ("online", 0), ("last", 9)]
    tasks = []
    for name, priority in came:
        tasks.append(asyncio.create_task(one(name, priority)))
        await asyncio.sleep(0)
    tasks[3].cancel()  # one in the middle of those that wait
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait(tasks, timeout=5)
    assert order == ["first", "online", "flex", "second", "last"]


def test_one_that_is_cancelled_while_it_waits_leaves_its_place() -> None:
    async def scene() -> None:
        gate = SequenceLimit(lambda: 4)
        entered = asyncio.Event()

        async def one() -> None:
            async with gate.entered(4):
                entered.set()
                await asyncio.Event().wait()

        first, second = asyncio.create_task(one()), asyncio.create_task(one())
        await entered.wait()
        entered.clear()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        third = asyncio.create_task(one())
        first.cancel()
        await asyncio.wait_for(entered.wait(), 5)
        third.cancel()
        await asyncio.gather(first, third, return_exceptions=True)
        async with asyncio.timeout(5), gate.entered(4):
            pass

    asyncio.run(scene())


def test_a_request_of_one_sequence_never_waits() -> None:
    async def scene() -> None:
        gate = SequenceLimit(lambda: 4)
        async with gate.entered(128), asyncio.timeout(5), gate.entered(1):
            pass

    asyncio.run(scene())


# -- large messages begin one after another, and the loop is others' in between -----------------


STRETCH_S = 0.05


def read_message() -> None:
    """Do what reading a large message does to the loop."""
    time.sleep(STRETCH_S)


async def test_many_large_messages_leave_the_loop_to_others_half_of_the_time() -> None:
    turns, begun = LargeMessages(), list[float]()

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
    first = asyncio.create_task(LargeMessages().wait())
    for _ in range(3):
        await asyncio.sleep(0)
    assert first.done()


async def test_one_that_is_given_up_lets_the_next_begin() -> None:
    turns = LargeMessages()
    waiting = [asyncio.create_task(turns.wait()) for _ in range(3)]
    waiting[1].cancel()
    await asyncio.wait(waiting, timeout=5)
    assert [task.cancelled() for task in waiting] == [False, True, False]
