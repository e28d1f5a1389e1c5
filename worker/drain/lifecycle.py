"""Keeps a worker's state, and the time limits of its stop.

A stop ends within a sum of seconds: WARMQ_DRAIN_TIMEOUT_S, the time that the engine's processes get
between SIGTERM and SIGKILL, and STOP_S.
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

#: Seconds that aborted requests get to end; then they are handed back although they still run.
ABORT_S = 2.0
#: Seconds for the last writes to Redis, among them those that hand requests back.
HURRY_S = 5.0
#: Seconds that cancelled tasks get to end.
CANCEL_S = 1.0
#: The rest of a stop's seconds: the sum of HURRY_S, SHUTDOWN_S (keeper.py), several CANCEL_S, and
#: the time in which Celery closes connections to a Redis that does not answer.
STOP_S = 25.0
#: The file descriptor of stderr.
_STDERR = 2


class State(StrEnum):
    """The state of a worker, as `celery inspect stats` shows it."""

    STARTING = "starting"
    READY = "ready"
    SWAPPING = "swapping"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """The state of one worker, and the two steps of its stop, which is final.

    In the first step running requests may finish. The second, a hurried stop, begins after
    WARMQ_DRAIN_TIMEOUT_S at the latest, in a swap after WARMQ_SWAP_DRAIN_S: requests are handed
    back.
    """

    def __init__(
        self,
        drain_timeout_s: float,
        give_up_in: Callable[[float], None],
        swap_drain_s: float = 0.0,
    ) -> None:
        """Prepare; `give_up_in` gets the seconds after which writes to Redis are not retried."""
        self.state = State.STARTING
        #: Whether the stop is that of a swap: the process goes on with another model.
        self.swapping = False
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._drain_timeout_s, self._swap_drain_s = drain_timeout_s, swap_drain_s
        self._give_up_in = give_up_in

    @property
    def stopping(self) -> bool:
        """Whether the worker stops: it takes no more requests."""
        return self._asked.is_set()

    @property
    def hurrying(self) -> bool:
        """Whether the stop is hurried: the worker no longer waits for running requests."""
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
        """Begin the stop; the first call starts the time in which requests may finish."""
        if not self.stopping:
            self._asked.set()
            self.state = State.SWAPPING if self.swapping else State.DRAINING
            self._hurry_in(self._swap_drain_s if self.swapping else self._drain_timeout_s)

    def _hurry_in(self, seconds: float) -> None:
        self._give_up_in(seconds + HURRY_S)
        asyncio.get_running_loop().call_later(seconds, self.hurry)

    def no_swap(self) -> None:
        """Note that the process ends with this stop, although it began as that of a swap."""
        if self.swapping:
            self.swapping = False
            self.state = State.DRAINING
            if not self.hurrying:
                self._hurry_in(self._drain_timeout_s)

    def hurry(self) -> None:
        """Stop without waiting for running requests."""
        self.stop()
        if not self._hurried.is_set():
            self._hurried.set()
            self._give_up_in(HURRY_S)

    def stopped(self) -> None:
        """Note that the engine has ended; the worker runs no more requests."""
        self.state = State.STOPPED

    async def until_asked(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await `work` and return True; if a stop begins, cancel `work` and return False."""
        return await until(self._asked, work)

    async def until_hurried(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await `work` and return True; if the stop is hurried, cancel `work` and return False."""
        return await until(self._hurried, work)


async def until(event: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Await `work` and return True; if the event is set first, cancel `work` and return False."""
    task = asyncio.create_task(work)
    event_set = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, event_set], return_when=asyncio.FIRST_COMPLETED)
    finally:
        event_set.cancel()
        finished = task.done()
        await end_tasks([task], CANCEL_S)
    if finished:
        task.result()
    elif task.done() and not task.cancelled() and (error := task.exception()):
        log.warning("while stopping: %s", error, extra={"action": "stop_error"})
    return finished


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], timeout_s: float = math.inf) -> None:
    """Cancel tasks repeatedly until all have ended, or `timeout_s` is over.

    One cancellation may not suffice: if a timeout expires at that moment, redis-py turns the
    cancellation into a TimeoutError, which tasks survive.
    """
    deadline = time.monotonic() + timeout_s
    pending = {task for task in tasks if not task.done()}
    while pending and time.monotonic() < deadline:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.1)


class ExitTimer:
    """Ends the process with exit status 1 if its stop takes too long.

    The thread of faulthandler does this, because it needs neither the event loop nor a lock. Before
    the exit it writes the tracebacks of all threads to stderr.
    """

    def __init__(self) -> None:
        self._at = math.inf

    def within(self, seconds: float) -> None:
        """Exit after `seconds`, or at the earlier time of a previous call."""
        at = time.monotonic() + seconds
        if at < self._at:
            self._at = at
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
