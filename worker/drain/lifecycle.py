"""States of a worker, and the time limits of its stop, in seconds.

A stop ends within WARMQ_DRAIN_TIMEOUT_S, plus the grace of the engine's processes between SIGTERM
and SIGKILL, plus STOP_S.
"""

import asyncio
import faulthandler
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from enum import StrEnum
from typing import Any

log = logging.getLogger(__name__)

#: Limit for aborted requests to end; then they are handed back although they run on.
ABORT_S = 2.0
#: Limit for the last writes to Redis once everything is handed back.
HURRY_S = 5.0
#: Limit for cancelled tasks to end.
CANCEL_S = 1.0
#: The rest of a stop: HURRY_S, SHUTDOWN_S of supervisor.py, some CANCEL_S, and what Celery
#: needs to close its connections to a Redis that does not answer.
STOP_S = 25.0
_STDERR = 2


class State(StrEnum):
    """The state of a worker, as `inspect stats` shows it."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """The state of one worker; a stop hurries after the drain timeout and is final."""

    def __init__(self, drain_timeout_s: float, give_up_in: Callable[[float], None]) -> None:
        """Prepare; `give_up_in` limits how long writes to Redis are retried."""
        self.state = State.STARTING
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._drain_timeout_s = drain_timeout_s
        self._give_up_in = give_up_in

    @property
    def stopping(self) -> bool:
        """Whether the worker takes nothing more."""
        return self._asked.is_set()

    @property
    def hurrying(self) -> bool:
        """Whether the worker no longer waits for requests."""
        return self._hurried.is_set()

    def engine_ready(self) -> None:
        """Note that the engine can run requests."""
        if not self.stopping:
            self.state = State.READY

    def engine_dead(self) -> None:
        """Note that the engine has to be replaced."""
        if not self.stopping:
            self.state = State.DEGRADED

    def stop(self) -> None:
        """Begin to stop; the drain timeout counts from the first call."""
        if not self.stopping:
            self._asked.set()
            self.state = State.DRAINING
            self._give_up_in(self._drain_timeout_s + HURRY_S)
            asyncio.get_running_loop().call_later(self._drain_timeout_s, self.hurry)

    def hurry(self) -> None:
        """Stop without waiting for requests."""
        self.stop()
        if not self._hurried.is_set():
            self._hurried.set()
            self._give_up_in(HURRY_S)

    def stopped(self) -> None:
        """Note that the engine has ended, and with it the worker's work."""
        self.state = State.STOPPED

    async def until_asked(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await work, but cancel it when a stop is asked for; return False then."""
        return await until(self._asked, work)

    async def until_hurried(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await work, but cancel it when the worker must hurry; return False then."""
        return await until(self._hurried, work)


async def until(event: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Await work, but cancel it when the event is set; return False then."""
    task = asyncio.create_task(work)
    event_set = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, event_set], return_when=asyncio.FIRST_COMPLETED)
    finally:
        event_set.cancel()
        over = task.done()
        await end_tasks([task], CANCEL_S)
    if over:
        task.result()
    elif task.done() and not task.cancelled() and (error := task.exception()):
        log.warning("while stopping: %s", error, extra={"action": "stop_error"})
    return over


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], timeout_s: float = math.inf) -> None:
    """Cancel tasks again and again until all have ended, or the time is over.

    redis-py turns a cancellation at an expired timeout into a TimeoutError, which tasks survive.
    """
    deadline = time.monotonic() + timeout_s
    pending = {task for task in tasks if not task.done()}
    while pending and time.monotonic() < deadline:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.1)


class ExitTimer:
    """Ends the process with exit status 1 when its stop takes too long.

    faulthandler's thread needs no event loop and no lock; it writes all tracebacks to stderr.
    """

    def __init__(self) -> None:
        self._at = math.inf

    def within(self, seconds: float) -> None:
        """Exit after `seconds`, unless an earlier exit is set."""
        at = time.monotonic() + seconds
        if at < self._at:
            self._at = at
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
