"""Kills an engine that hangs."""

import asyncio
import logging

from worker.drain.loop import Drain

log = logging.getLogger(__name__)


class Watchdog:
    """Kills an engine that makes no step while requests are in it.

    What counts is the time with requests in it and without a step, whichever requests these are:
    in a hung engine they may expire or be cancelled one after the other. It is counted in looks,
    not read from a clock: a worker process that was itself stopped has seen no step either.
    """

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._limit_s = drain.settings.stall_timeout_s
        self._pause_s = min(1.0, self._limit_s / 4)
        self._latest_step = self._stalled_s = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            self._look()
            if self._stalled_s > self._limit_s:
                self._stalled_s = 0.0
                self._kill()

    def _look(self) -> None:
        supervisor = self._drain.supervisor
        if not supervisor.running:
            self._stalled_s = 0.0
        elif self._drain.in_flight.tasks():
            step = supervisor.engine.last_progress()
            stalled = step == self._latest_step
            self._stalled_s = self._stalled_s + self._pause_s if stalled else 0.0
            self._latest_step = step
        elif supervisor.dead():
            self._drain.wakeup.poke()  # rebuilt now, not when the next request has come

    def _kill(self) -> None:
        log.error(
            "the engine made no step for %.0f s with requests in flight: killing it",
            self._limit_s,
            extra={"action": "engine_hung"},
        )
        supervisor, in_flight = self._drain.supervisor, self._drain.in_flight
        if supervisor.dead():  # killed before, but its library does not report it
            in_flight.abort(in_flight, "died")
        supervisor.kill()
