"""Ends a process whose event loop is blocked, from a thread.

A blocked loop counts as a death, like an engine's, for the request that the loop was running. The
rest is handed back uncounted, and the process exits with 1, to be restarted by its supervisor.
The engine's processes end with it.

A call that keeps the interpreter's lock blocks this thread, too. In that case a kernel timer,
reset at each check, expires: its signal writes every thread's stack and ends the process without
Python. It counts the process' CPU time, so a suspended process survives. Nothing is handed back
then: the leases expire, and SWEEP counts the deaths.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback

from contract.message import Delivery
from worker.drain.drain import Drain
from worker.drain.in_flight import Running
from worker.drain.leases import Leases

log = logging.getLogger(__name__)

EXIT_STALLED = 1
#: The least limit, as WARMQ_STALL_TIMEOUT_S may be shorter for engines: imports, and machines with
#: more work than cores, block a loop for so long.
LEAST_S = 5.0
#: The limit once the worker is stopping.
STOPPING_S = 10.0
#: How long the hand-back to Redis may take; else the leases expire.
RELEASE_S = 5.0
_STDERR = 2


class LoopWatch:
    """Watches the loop of a drain; a context manager, entered on that loop.

    Time is counted in checks, not read from a clock: a process that was suspended made no checks
    either.
    """

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._limit_s = max(LEAST_S, drain.settings.stall_timeout_s)
        self._pause_s = min(1.0, self._limit_s / 4)
        self._turns = 0
        self._over = threading.Event()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop
        self._loop_thread = 0
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)

    def __enter__(self) -> LoopWatch:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        faulthandler.register(signal.SIGVTALRM, file=_STDERR, all_threads=True, chain=True)
        self._turn()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join(self._pause_s)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def stop_asked(self) -> None:
        """Apply the shorter limit: the process is stopping. In any thread."""
        self._stopping = True

    def _turn(self) -> None:
        self._turns += 1
        self._timer = self._loop.call_later(self._pause_s / 2, self._turn)

    def _watch(self) -> None:
        seen, blocked_s = 0, 0.0
        while True:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._limit_s + RELEASE_S)
            if self._over.wait(self._pause_s):
                return
            blocked_s = blocked_s + self._pause_s if self._turns == seen else 0.0
            seen = self._turns
            stopping = self._stopping or self._drain.lifecycle.stopping
            limit_s = min(self._limit_s, STOPPING_S) if stopping else self._limit_s
            if blocked_s > limit_s:
                self._end(limit_s)

    def _end(self, limit_s: float) -> None:
        """Log the loop's stack, hand everything back, and exit."""
        task = asyncio.current_task(self._loop)
        running: list[Running] = list(self._drain.in_flight)
        culprits = [one.delivery for one in running if one.task is not None and one.task is task]
        names = ", ".join(delivery.request_id for delivery in culprits)
        frame = sys._current_frames().get(self._loop_thread)
        log.critical(
            "the drain's loop in process %d has been blocked for %.0f s by %s: the process exits "
            "with %d; requests that block the loop again become dead letters. The loop's "
            "stack:\n%s",
            os.getpid(),
            limit_s,
            f"request {names}" if names else "none of its requests",
            EXIT_STALLED,
            "".join(traceback.format_stack(frame)) if frame else "",
            extra={"action": "loop_hung"},
        )
        last_resort = threading.Timer(2 * RELEASE_S, os._exit, (EXIT_STALLED,))
        last_resort.daemon = True
        last_resort.start()
        deliveries = [one.delivery for one in running]
        try:
            asyncio.run(self._release(deliveries, frozenset(one.lease for one in culprits)))
        except Exception as error:
            log.warning(
                "requests return when their leases end: %s",
                error,
                extra={"action": "release_refused"},
            )
        finally:
            os._exit(EXIT_STALLED)

    async def _release(self, deliveries: list[Delivery], culprits: frozenset[str]) -> None:
        """Hand back in time, over this thread's own connection.

        If no request is known as the cause, nothing is handed back: SWEEP then counts a death for
        everything in the engine, and suspects run separately.
        """
        if not culprits:
            return
        async with asyncio.timeout(RELEASE_S):
            leases = Leases(self._drain.settings, self._drain.leases.worker_id)
            await leases.release(deliveries, culprits)
            await leases.leave()
