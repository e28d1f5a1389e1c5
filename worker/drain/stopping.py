"""How long each part of a worker's stop may take, in seconds, and how tasks and the process are
ended in time (worker/drain/lifecycle.py says when)."""

import asyncio
import faulthandler
import logging
import math
import time
from collections.abc import Coroutine, Iterable
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
