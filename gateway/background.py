"""Work that goes on for as long as a gateway serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

log = logging.getLogger(__name__)

#: After an error of its own, work begins again in so many seconds.
AGAIN_S = 1.0
#: What is cancelled and has not ended is cancelled again in so many seconds.
CANCEL_AGAIN_S = 0.1


@asynccontextmanager
async def background(*works: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run endless work while the context is open. What ends by an error is told, and begins again:
    a gateway without it would look well, and lack something."""
    tasks = [asyncio.create_task(kept(work)) for work in works]
    try:
        yield
    finally:
        await cancel_all(tasks)


async def kept(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run endless work until cancelled, anew after each error."""
    while True:
        running = work()
        try:
            await running
        except Exception:
            told = getattr(running, "__qualname__", "work")
            log.exception("%s has failed; it begins again", told, extra={"action": "begun_again"})
        check_cancelled()
        await asyncio.sleep(AGAIN_S)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended: a cancellation that meets the error of a lost connection
    may be lost with it."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


def check_cancelled() -> None:
    """Raise CancelledError if this task was cancelled, and something has swallowed it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
