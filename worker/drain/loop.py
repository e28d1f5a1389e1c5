"""The drain: leases requests from the queue and keeps every slot of the engine full.

    refill:  free room? -> POP -> one asyncio task per request
    serve:   check -> engine.generate -> ending
    commit:  endings in groups -> DONE -> room

Slots are refilled one by one; a small look-ahead above them waits inside the
engine's own scheduler. Nothing is popped before the engine is ready.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from worker.drain.events import Drained, Stopped, Stopping
from worker.drain.hand_over import hand_over
from worker.drain.leases import Leases
from worker.drain.others import Others, Share
from worker.drain.scripts import ERRORS
from worker.drain.serving import Serving
from worker.drain.stopping import end_tasks
from worker.drain.suspects import Suspects
from worker.drain.wakeup import REDIS_PAUSE_S
from worker.engine import Engine
from worker.settings import WorkerSettings

#: Bytes of messages that a worker holds before it takes no more: 25 of the longest lines.
MAX_IN_FLIGHT_BYTES = 256 * 2**20


class Drain(Serving):
    """Drains one queue into one engine until told to stop."""

    def __init__(
        self,
        settings: WorkerSettings,
        leases: Leases,
        make: Callable[[], Engine],
        others: Others | None = None,
        part_of: str | None = None,
    ) -> None:
        """Prepare to drain into the engine that `make` returns, not built yet.

        `others` are drains of the same engine; `part_of` says that this is one of another's.
        """
        super().__init__(settings, leases, make, others or Share(), part_of)
        self.suspects = Suspects(self)
        self._most_bytes = self.others.of(MAX_IN_FLIGHT_BYTES)
        self.paused = False
        self.idle = asyncio.Event()
        #: Requests that had ended, and were handed back, when the stop began.
        self._before_stop = (0, 0)

    async def run(self, beside: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Start the engine, drain until stopped, hand back what is left.

        `beside` runs meanwhile (worker/drain/side_tasks.py); if any of it dies, so does the drain.
        """
        async with asyncio.TaskGroup() as group:
            self._committing = group.create_task(self._committer.run())
            side = [
                self._committing,
                *(group.create_task(c) for c in (*self.wakeup.tasks(), *beside)),
            ]
            try:
                if await self.lifecycle.until_asked(self.supervisor.start()):
                    self.measure_room()
                    await self.lifecycle.until_hurried(self._refill())
            finally:
                self._begin_stop()
                try:
                    await hand_over(self, self.suspects)
                    self.events.publish(self._drained())
                finally:  # Redis may be away, or a side task may have died meanwhile
                    try:
                        await self.supervisor.stop()
                    finally:
                        await end_tasks(side)
        self.events.publish(Stopped())

    async def _refill(self) -> None:
        while not self.lifecycle.stopping:
            self.wakeup.clear()
            await self.recover()
            if self.paused:
                await self.settle()
                self.idle.set()
                await self.wakeup.wait()
                continue
            free = self.room.limit - len(self.in_flight) + len(self.preparing)
            free_bytes = self._most_bytes - self.in_flight.size
            if free < self.room.low_water or free_bytes <= 0:
                await self.wakeup.wait()
                continue
            popped = await self.pop(free, max_bytes=free_bytes)
            if popped is None:
                continue
            self.admit(popped)
            if popped.suspects and not self.part_of and await self._run_suspects():
                continue
            if not popped.deliveries and not popped.more:
                await self.wakeup.wait(queue_empty=True)

    async def _run_suspects(self) -> bool:
        try:
            return await self.suspects.run()
        except ERRORS as error:
            self.outage.lost(error)
            await asyncio.sleep(REDIS_PAUSE_S)
            return True

    def pause(self, paused: bool) -> None:
        """Take nothing from the queue for a while; `idle` is set when nothing is in flight."""
        self.paused = paused
        self.idle.clear()
        self.wakeup.poke()

    def stop(self) -> None:
        """Take nothing more; what runs may finish within the drain timeout."""
        if not self.lifecycle.stopping:
            self.events.publish(Stopping(len(self.in_flight), self.settings.drain_timeout_s))
        self._begin_stop()

    def hurry(self) -> None:
        """Hand everything back at once."""
        if not self.lifecycle.hurrying:
            self.events.publish(Stopping(len(self.in_flight), 0))
        self._begin_stop()
        self.lifecycle.hurry()

    def _begin_stop(self) -> None:
        if not self.lifecycle.stopping:
            self._before_stop = self.counts.ended, self.counts.handed_back
        self.lifecycle.stop()
        self.wakeup.poke()

    def _drained(self) -> Drained:
        ended, handed_back = self._before_stop
        return Drained(self.counts.ended - ended, self.counts.handed_back - handed_back)
