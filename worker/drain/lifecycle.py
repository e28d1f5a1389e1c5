"""What a worker is doing, from its start to its end, and how long each part of its stop may take.

From the signal on, a stop ends within WARMQ_DRAIN_TIMEOUT_S, plus the grace that the engine's
processes get between SIGTERM and SIGKILL, plus STOP_S. All times are seconds.
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


class State(StrEnum):
    """What the worker is doing, as `inspect stats` shows it."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """The state of one worker, and its stop: first asked for, then hurried.

    It hurries once the drain timeout is over. A worker that stops does not become ready again.
    """

    def __init__(self, drain_timeout_s: float, give_up_in: Callable[[float], None]) -> None:
        self.state = State.STARTING
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._drain_timeout_s = drain_timeout_s
        #: Tells the writes to Redis for how long they may still be tried.
        self._give_up_in = give_up_in

    @property
    def stopping(self) -> bool:
        """Whether the worker takes nothing more."""
        return self._asked.is_set()

    @property
    def hurrying(self) -> bool:
        """Whether the worker waits for nothing any more."""
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
        """Wait for nothing any more."""
        self.stop()
        if not self._hurried.is_set():
            self._hurried.set()
            self._give_up_in(HURRY_S)

    def stopped(self) -> None:
        """Note that the engine has ended, and with it the worker's work."""
        self.state = State.STOPPED

    async def until_asked(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await work, but end it when a stop is asked for; False then."""
        return await until(self._asked, work)

    async def until_hurried(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await work, but end it when the worker must hurry; False then."""
        return await until(self._hurried, work)


async def until(event: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Await work, but end it when the event is set; False then."""
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


class ExitTimer:
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
