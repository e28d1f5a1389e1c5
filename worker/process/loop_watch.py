"""Ends a process whose event loop stands: nothing on the loop could.

A thread looks at the loop's turns. A loop that stands is a death, as an engine's: what the loop was
running counts it, everything else is handed back uncounted, and the process exits with 1, for
whoever runs it to start it again. The engine's processes end with it.

A call that holds the interpreter's lock stops this thread as well. For that there is a timer of the
kernel, which each look sets anew: its signal writes every thread's stack and ends the process
without Python. It counts the process' own time on a CPU, so one that was suspended is left alone.
Nobody hands back then: the leases end, and SWEEP counts the deaths.
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
#: A shorter WARMQ_STALL_TIMEOUT_S is for engines. A loop may stand that long for imports, or on a
#: machine with more to do than cores.
LEAST_S = 5.0
#: How long the loop may stand once the worker is to stop.
STOPPING_S = 10.0
#: How long Redis may take to take everything back; else the leases end.
RELEASE_S = 5.0
_STDERR = 2


class LoopWatch:
    """Watches the loop that a drain runs on; a context manager, entered on that loop.

    Time is counted in looks, not read from a clock: a process that was itself stopped has made no
    look either. A debugger that stops one thread alone does count.
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
        """Let the loop stand for less from now on: the process is to stop. In any thread."""
        self._stopping = True

    def _turn(self) -> None:
        self._turns += 1
        self._timer = self._loop.call_later(self._pause_s / 2, self._turn)

    def _watch(self) -> None:
        seen, stood_s = 0, 0.0
        while True:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._limit_s + RELEASE_S)
            if self._over.wait(self._pause_s):
                return
            stood_s = stood_s + self._pause_s if self._turns == seen else 0.0
            seen = self._turns
            stopping = self._stopping or self._drain.lifecycle.stopping
            limit_s = min(self._limit_s, STOPPING_S) if stopping else self._limit_s
            if stood_s > limit_s:
                self._end(limit_s)

    def _end(self, limit_s: float) -> None:
        """Say what the loop does, hand everything back, and exit."""
        running = asyncio.current_task(self._loop)
        held: list[Running] = list(self._drain.in_flight)
        deliveries = [one.delivery for one in held]
        culprits = [one.delivery for one in held if one.task is not None and one.task is running]
        names = ", ".join(delivery.request_id for delivery in culprits)
        frame = sys._current_frames().get(self._loop_thread)
        log.critical(
            "the drain's loop in process %d has stood for %.0f s, running %s: the process ends "
            "with %d, and whoever runs it is to start it again; requests that do so again become "
            "dead letters. The loop's stack:\n%s",
            os.getpid(),
            limit_s,
            f"request {names}" if names else "no request of its own",
            EXIT_STALLED,
            "".join(traceback.format_stack(frame)) if frame else "",
            extra={"action": "loop_hung"},
        )
        last_resort = threading.Timer(2 * RELEASE_S, os._exit, (EXIT_STALLED,))
        last_resort.daemon = True
        last_resort.start()
        try:
            asyncio.run(self._release(deliveries, frozenset(one.lease for one in culprits)))
        except Exception as error:  # SWEEP puts it back once the leases have ended
            log.warning(
                "requests return when their leases end: %s",
                error,
                extra={"action": "release_refused"},
            )
        finally:
            os._exit(EXIT_STALLED)

    async def _release(self, deliveries: list[Delivery], culprits: frozenset[str]) -> None:
        """Hand back in time, over a connection of this thread's own.

        Nothing is handed back where no request is found to be the cause: SWEEP counts a death for
        all that was inside then, and suspects are run apart.
        """
        if not culprits:
            return
        async with asyncio.timeout(RELEASE_S):
            leases = Leases(self._drain.settings, self._drain.leases.worker_id)
            await leases.release(deliveries, culprits)
            await leases.leave()
