"""Tenants have turns at what is done one at a time."""

from __future__ import annotations

import asyncio

import pytest

from worker.engine.vllm.grammars import FairTurns


class Line:
    """Requests of tenants at one `FairTurns`; `ended` has them in the order of their turns."""

    def __init__(self, places: int = 1) -> None:
        self.turns, self.go_on = FairTurns(places), asyncio.Event()
        self.entered: list[str] = []

    async def enter(self, tenant: str) -> None:
        async with self.turns.taken(tenant):
            self.entered.append(tenant)
            await self.go_on.wait()

    async def come(self, tenants: str) -> list[asyncio.Task[None]]:
        """Let requests come one after the other, all before the first one goes."""
        tasks = []
        for tenant in tenants:
            tasks.append(asyncio.create_task(self.enter(tenant)))
            await asyncio.sleep(0)
        return tasks


@pytest.mark.parametrize(
    ("came", "entered"),
    [
        ("aaaab", "aabaa"),
        ("aaabbb", "aababb"),
        ("aaabcb", "aabcab"),
        ("aaaa", "aaaa"),
        ("ab", "ab"),
    ],
)
async def test_who_comes_waits_for_one_of_each_tenant_at_most(came: str, entered: str) -> None:
    line = Line()
    tasks = await line.come(came)
    line.go_on.set()
    await asyncio.gather(*tasks)
    assert "".join(line.entered) == entered
    await line.enter("z")  # nothing is left taken


async def test_one_that_gives_up_has_no_turn_and_keeps_none() -> None:
    line = Line()
    tasks = await line.come("aabc")
    tasks[1].cancel()
    await asyncio.sleep(0)
    line.go_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert line.entered == ["a", "b", "c"]
    await line.enter("z")
    assert line.entered[-1] == "z"


async def test_one_that_gives_up_as_it_gets_its_turn_passes_it_on() -> None:
    line = Line()
    first, second, third = await line.come("abc")
    first.cancel()
    await asyncio.sleep(0)  # the first one's turn goes to the second, which has not run yet
    second.cancel()
    line.go_on.set()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert line.entered == ["a", "c"]


async def test_an_error_passes_the_turn_on() -> None:
    turns = FairTurns(1)
    with pytest.raises(ValueError, match="no"):
        async with turns.taken("a"):
            raise ValueError("no")
    async with turns.taken("b"):
        pass


async def test_as_many_as_there_are_places_have_one_at_a_time() -> None:
    line = Line(2)
    tasks = await line.come("aaab")
    assert line.entered == ["a", "a"]
    line.go_on.set()
    await asyncio.gather(*tasks)
    assert line.entered == ["a", "a", "a", "b"]
    line.go_on.clear()
    tasks = await line.come("zzz")
    assert line.entered[4:] == ["z", "z"]  # both places were given back
    line.go_on.set()
    await asyncio.gather(*tasks)
