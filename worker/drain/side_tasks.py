"""Makes the side tasks, which run next to the drain's loop and survive an outage of Redis."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from worker.drain.cancels import Cancels
from worker.drain.deadlines import DeadlineOrder
from worker.drain.drain import Drain
from worker.drain.events import LeasesLost
from worker.drain.heartbeat import beat
from worker.drain.notifier import notify
from worker.drain.progress import History, Progress
from worker.drain.running_text import RunningText
from worker.drain.scripts import ERRORS
from worker.drain.sweeper import sweep
from worker.drain.wakeup import REDIS_PAUSE_S

log = logging.getLogger(__name__)


class SideTasks:
    """The side tasks of one drain."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self.text = RunningText(drain)
        self.cancels = Cancels(drain, self.text)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines to run."""
        return [
            beat(self._drain),
            keep_leases(self._drain),
            await_online(self._drain),
            sweep(self._drain),
            Watchdog(self._drain).run(),
            DeadlineOrder(self._drain).run(),
            Progress(self._drain).run(),
            History(self._drain).run(),
            notify(self._drain),
            self.cancels.run(),
            self.text.run(),
        ]


async def keep_leases(drain: Drain) -> None:
    """Renew the leases and the lock for suspects until cancelled."""
    lease_s = drain.settings.lease_s
    pause_s = lease_s / 3
    while True:
        await asyncio.sleep(pause_s)
        try:
            lost = await drain.leases.renew(drain.in_flight.leases())
            await drain.leases.renew_suspects_lock()
        except ERRORS as error:
            drain.outage.lost(error)
            pause_s = min(1.0, lease_s / 12)  # after another third the leases might have expired
            continue
        drain.outage.over()
        pause_s = lease_s / 3
        requests = (drain.in_flight.get(lease) for lease in lost)
        if unended := [r for r in requests if r is not None and not r.ended]:
            drain.events.publish(LeasesLost([r.delivery for r in unended]))
            drain.in_flight.abort(unended, "lost")


async def await_online(drain: Drain) -> None:
    """Make the drain's loop take online requests (of priority 0) when they arrive."""
    while True:
        try:
            if await drain.leases.wait_for_online():
                drain.wakeup.poke()
                await drain.refill.online_arrived()
        except ERRORS:
            await asyncio.sleep(REDIS_PAUSE_S)


class Watchdog:
    """Kills an engine that makes no step for WARMQ_STALL_TIMEOUT_S while requests are in it.

    The time is a sum of pauses between checks, not a clock's time: the time in which the worker's
    process was suspended (SIGSTOP) does not count.
    """

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._limit_s = drain.settings.stall_timeout_s
        self._pause_s = min(1.0, self._limit_s / 4)
        self._latest_step = self._stalled_s = 0.0

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            self._check()
            if self._stalled_s > self._limit_s:
                self._stalled_s = 0.0
                self._kill()

    def _check(self) -> None:
        supervisor = self._drain.supervisor
        if not supervisor.running:
            self._stalled_s = 0.0
        elif self._drain.in_flight.tasks():
            step = supervisor.engine.last_progress()
            stalled = step == self._latest_step
            self._stalled_s = self._stalled_s + self._pause_s if stalled else 0.0
            self._latest_step = step
        elif supervisor.dead():
            # The drain's loop rebuilds the engine now, without waiting for a request.
            self._drain.wakeup.poke()

    def _kill(self) -> None:
        text = "the engine made no step for %.0f s with requests in flight: killing it"
        log.error(text, self._limit_s, extra={"action": "engine_hung"})
        supervisor, in_flight = self._drain.supervisor, self._drain.in_flight
        if supervisor.dead():  # it was killed before, but requests in it have not ended
            in_flight.abort(in_flight, "died")
        supervisor.kill()
