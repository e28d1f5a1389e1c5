"""Cancels a coroutine's task once, at one of its awaits, and looks what is left of it."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

Make = Callable[[], Coroutine[Any, Any, None]]
#: So long a task may take to end, and one that waits for nothing to come, in s.
END_S, QUIET_S = 5.0, 1.0


@dataclass(slots=True)
class Course:
    """How often a coroutine has been suspended, and whether its task was cancelled."""

    suspended: int = 0
    cancelled: bool = False


@types.coroutine
def _stepped(
    work: Coroutine[Any, Any, None], at: int, late: bool, course: Course
) -> Generator[Any, Any, None]:
    """Run a coroutine, and cancel the task at its `at`-th suspension: while it waits, or (`late`)
    in the moment in which what it waits for has come, and it has not gone on yet."""
    task = asyncio.current_task()
    assert task is not None

    def cancel(_: object = None) -> None:
        course.cancelled = True
        task.cancel()

    error: BaseException | None = None
    while True:
        try:
            waited = work.send(None) if error is None else work.throw(error)
        except StopIteration:
            return
        course.suspended += 1
        if course.suspended == at:
            if late and waited is not None:
                waited.add_done_callback(cancel)
            else:
                cancel()
        error = None
        try:
            yield waited
        except BaseException as raised:
            error = raised


async def cancel_at(make: Make, at: int, late: bool) -> bool:
    """Run what `make` returns, cancel it once, and hold that it ends so, with all it has begun.

    Returns:
        False if it was not suspended so often, and waits for what does not come.
    """
    before, course = asyncio.all_tasks(), Course()

    async def run() -> None:
        await _stepped(make(), at, late, course)

    task = asyncio.create_task(run())
    seen = -1
    while not course.cancelled and not task.done() and seen != course.suspended:
        seen = course.suspended
        await asyncio.wait([task], timeout=QUIET_S)
    reached = course.cancelled
    if not reached:
        task.cancel()
    where = f"cancelled {'late ' if late else ''}at its {at}. await"
    ended, _ = await asyncio.wait([task], timeout=END_S)
    assert ended, f"{where}, it goes on: {task.get_stack()}"
    assert task.cancelled(), f"{where}, it ended otherwise: {task.exception()!r}"
    if left := asyncio.all_tasks() - before - {task}:
        _, left = await asyncio.wait(left, timeout=END_S)
        assert not left, f"{where}, it left {left}"
    return reached
