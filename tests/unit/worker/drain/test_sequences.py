"""What counts as a sequence, and how requests of many of them share the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from contract.openai.sequences import sequences_of
from worker.drain.sequences import Sequences


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
    gate = Sequences(lambda: limit)
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


def test_one_that_is_cancelled_while_it_waits_leaves_its_place() -> None:
    async def scene() -> None:
        gate = Sequences(lambda: 4)
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
        gate = Sequences(lambda: 4)
        async with gate.entered(128), asyncio.timeout(5), gate.entered(1):
            pass

    asyncio.run(scene())
