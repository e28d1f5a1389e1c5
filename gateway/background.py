"""Runs a gateway's background tasks: restarts failed ones, cancels all at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

log = logging.getLogger(__name__)

#: Seconds from a task's failure to its restart, and seconds from one cancellation to the next.
AGAIN_S, CANCEL_AGAIN_S = 1.0, 0.1


@asynccontextmanager
async def background(*works: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run endless tasks while the context is open; log their errors, and restart them."""
    tasks = [asyncio.create_task(_run_and_restart(work)) for work in works]
    try:
        yield
    finally:
        await cancel_all(tasks)


async def _run_and_restart(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        running = work()
        try:
            await running
        except Exception:
            name = getattr(running, "__qualname__", "a task")
            log.exception("%s failed and is restarted", name, extra={"action": "begun_again"})
        check_cancelled()
        await asyncio.sleep(AGAIN_S)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended.

    A task may need several cancellations: the error of a lost connection may hide one.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


def check_cancelled() -> None:
    """Raise CancelledError if this task was cancelled, but some code caught that error."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
