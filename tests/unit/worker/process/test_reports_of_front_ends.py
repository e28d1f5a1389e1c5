"""What the front ends of a worker have counted is told without a gap while one ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from worker.process.front_ends import FrontEnd, FrontEnds


class Part:
    """A front end that has told of itself once."""

    def __init__(self) -> None:
        self.report = {
            "in_flight": 3,
            "oldest_s": 2.5,
            "limit": 4,
            "slots": 4,
            "counts": {"completed": 7},
        }

    async def wait_for_end(self) -> None:
        """It has ended already."""

    def take_events(self) -> list[dict[str, Any]]:
        return [{"uuid": "the last"}]


def test_a_front_end_that_ends_is_counted_all_the_while(monkeypatch: pytest.MonkeyPatch) -> None:
    fronts = FrontEnds("w1", 2)
    while_it_ends: list[Any] = []

    @asynccontextmanager
    async def started(number: int, order: dict[str, Any]) -> AsyncIterator[Part]:
        yield Part()
        await asyncio.sleep(0)  # it is read to the end of what it has told
        while_it_ends.extend(fronts.reports())

    monkeypatch.setattr(FrontEnd, "started", started)
    asyncio.run(fronts._run_one(1, {}))
    assert [told["counts"] for told in while_it_ends] == [{"completed": 7}]
    (ended,) = fronts.reports()
    nothing = {"in_flight": 0, "oldest_s": 0, "limit": 0, "slots": 0}
    assert ended == Part().report | nothing
    assert fronts.task_events() == [{"uuid": "the last"}]
    assert fronts.task_events() == []
