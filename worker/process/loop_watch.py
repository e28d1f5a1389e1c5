"""Ends a process whose event loop is blocked; a thread checks this.

The request that the loop was running counts a death, as if the engine had died with it. All
requests are handed back, and the process exits with 1, to be restarted by systemd or Kubernetes.
The engine's processes end with it.

A call that keeps Python's global interpreter lock blocks the checking thread, too. Then a timer of
the kernel expires, which each check sets again: its signal writes the stacks of all threads and
ends the process without running Python code. No requests are handed back in this case: their leases
expire, and SWEEP counts the deaths. The timer counts the process's CPU time, so a suspended process
survives.
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

#: The exit status of a process whose loop was blocked.
EXIT_STALLED = 1
#: Least seconds that a loop may be blocked. WARMQ_STALL_TIMEOUT_S may be less, for engines, but
#: imports can block a loop for seconds, and so can a machine with more work than cores.
LEAST_S = 5.0
#: Most seconds that a loop may be blocked while the worker stops.
STOPPING_S = 10.0
#: Most seconds for handing requests back; after that their leases expire.
RELEASE_S = 5.0
#: The file descriptor of stderr.
_STDERR = 2


class LoopWatch:
    """Watches the event loop of a drain; a context manager, entered in that loop.

    The blocked time is a sum of pauses between checks, not a clock's time, so that the time in
    which the process is suspended does not count.
    """

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._limit_s = max(LEAST_S, drain.settings.stall_timeout_s)
        self._pause_s = min(1.0, self._limit_s / 4)
        #: Timer calls that the loop has made; the number stays the same while the loop is blocked.
        self._ticks = 0
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
        self._tick()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join(self._pause_s)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def note_stop(self) -> None:
        """Apply the limit of a process that stops; any thread may call this."""
        self._stopping = True

    def _tick(self) -> None:
        self._ticks += 1
        self._timer = self._loop.call_later(self._pause_s / 2, self._tick)

    def _watch(self) -> None:
        ticks_before, blocked_s = 0, 0.0
        while True:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._limit_s + RELEASE_S)
            if self._over.wait(self._pause_s):
                return
            blocked_s = blocked_s + self._pause_s if self._ticks == ticks_before else 0.0
            ticks_before = self._ticks
            stopping = self._stopping or self._drain.lifecycle.stopping
            limit_s = min(self._limit_s, STOPPING_S) if stopping else self._limit_s
            if blocked_s > limit_s:
                self._end(limit_s)

    def _end(self, limit_s: float) -> None:
        """Log the loop's stack, hand all requests back, and exit."""
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
        """Hand requests back within RELEASE_S, over a connection of this thread.

        If no request is known as the cause, none is handed back: SWEEP then counts a death for each
        request in the engine. After WARMQ_MAX_DEATHS such deaths they run apart, as suspects.
        """
        if not culprits:
            return
        async with asyncio.timeout(RELEASE_S):
            leases = Leases(self._drain.settings, self._drain.leases.worker_id)
            await leases.release(deliveries, culprits)
            await leases.leave()
