"""How a worker stops: what it was told and when, and how long each part of the stop may take.

From the signal on, a stop ends within WARMQ_DRAIN_TIMEOUT_S, plus the grace that the engine's
processes get between SIGTERM and SIGKILL, plus STOP_S. All times are seconds.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

log = logging.getLogger(__name__)

#: How long aborted requests may take to end; then they are handed back although they run on.
ABORT_S = 2.0
#: How long the last writes may wait for Redis once everything is to be handed back.
HURRY_S = 5.0
#: How long what is cancelled may take to end.
CANCEL_S = 1.0
#: The rest of a stop: HURRY_S, SHUTDOWN_S of supervisor.py, some CANCEL_S, and what Celery
#: needs to close its connections to a Redis that does not answer.
STOP_S = 25.0
_STDERR = 2


class Stopping:
    """One worker's stop: first asked for, in a hurry once the drain timeout is over."""

    def __init__(self, drain_timeout_s: float, give_up_in: Callable[[float], None]) -> None:
        self.asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._drain_timeout_s = drain_timeout_s
        #: Tells the writes to Redis for how long they may still be tried.
        self._give_up_in = give_up_in

    def ask(self) -> None:
        """Begin to stop; the drain timeout counts from the first call."""
        if not self.asked.is_set():
            self.asked.set()
            self._give_up_in(self._drain_timeout_s + HURRY_S)
            asyncio.get_running_loop().call_later(self._drain_timeout_s, self.hurry)

    def hurry(self) -> None:
        """Wait for nothing any more."""
        if not self._hurried.is_set():
            self._hurried.set()
            self._give_up_in(HURRY_S)

    async def until_asked(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await work, but end it when a stop is asked for; False then."""
        return await _until(self.asked, work)

    async def until_hurried(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await work, but end it when the worker must hurry; False then."""
        return await _until(self._hurried, work)


async def _until(event: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    task = asyncio.create_task(work)
    told = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, told], return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        over = task.done()
        await end_tasks([task], CANCEL_S)
    if over:
        task.result()
    elif task.done() and not task.cancelled() and (error := task.exception()):
        log.warning("while stopping: %s", error, extra={"action": "stop_error"})
    return over


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], timeout_s: float = math.inf) -> None:
    """Cancel until all have ended, or the time is over.

    Once is not enough: a cancellation that meets an expired socket timeout comes
    out of redis-py as a TimeoutError, which these tasks rightly survive.
    """
    deadline = time.monotonic() + timeout_s
    pending = {task for task in tasks if not task.done()}
    while pending and time.monotonic() < deadline:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.1)


class LastResort:
    """Ends the process when its stop takes too long, whatever hangs.

    Its timer is a thread of faulthandler, which needs neither the event loop nor the interpreter's
    lock: it writes what every thread is doing to stderr, and the process exits with 1.
    """

    def __init__(self) -> None:
        self._at = math.inf

    def within(self, seconds: float) -> None:
        """Exit after so many seconds, or earlier if that was said before."""
        at = time.monotonic() + seconds
        if at < self._at:
            self._at = at
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
