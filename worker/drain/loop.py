"""The drain: leases requests from the queue and keeps every slot of the engine full.

    refill:  free room? -> POP -> one asyncio task per request
    serve:   check -> engine.generate -> ending
    commit:  endings in groups -> DONE -> room

Slots are refilled one by one; a small look-ahead above them waits inside the
engine's own scheduler. Nothing is popped before the engine is ready.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from contract.errors import EngineDead, RequestFailed
from contract.redis import keys
from worker.drain.committer import Committer
from worker.drain.counts import Counts
from worker.drain.endings import Ending
from worker.drain.hand_over import hand_over
from worker.drain.in_flight import ABORTS, InFlight, Running
from worker.drain.leases import Leases, Popped, lease_number
from worker.drain.scripts import ERRORS
from worker.drain.serve import failed, serve
from worker.drain.stopping import Stopping, end_tasks
from worker.drain.supervisor import State, Supervisor
from worker.drain.suspects import run_suspects
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

REDIS_PAUSE_S = 0.25


class Drain:
    """Drains one queue into one engine until told to stop."""

    def __init__(self, settings: WorkerSettings, leases: Leases, supervisor: Supervisor) -> None:
        self.settings = settings
        self.leases = leases
        self.supervisor = supervisor
        self.in_flight = InFlight()
        self.counts = Counts()
        self.limit = 0
        self.slots = 0
        self.holds_suspects_lock = False
        #: Told of endings that are in Redis; None, and no call, while nobody listens.
        self.on_committed: Callable[[Sequence[Ending]], None] | None = None
        #: Names of the models and adapters served; empty where any will do.
        self._served: tuple[str, ...] = ()
        self._low_water = 1
        self._crashed: list[Running] = []
        self._stop = Stopping(settings.drain_timeout_s, leases.give_up_in)
        self._changed = asyncio.Event()
        self._hungry = asyncio.Event()
        self._committer = Committer(leases, self._committed)
        # A slot is filled again once Redis has the result: what a killed worker has computed in
        # vain is never more than slots and look-ahead. Answers of one length end together.
        self._committer.enough = lambda: min(len(self.in_flight), self._low_water)
        self._committing: asyncio.Task[None]

    # -- the loop ---------------------------------------------------------------

    async def run(self, upkeep: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Start the engine, drain until stopped, hand back what is left.

        `upkeep` runs beside (worker/drain/upkeep.py). If any side task dies, so does the drain.
        """
        wakers = (self._wake_on(key) for key in keys.priority_lists(self.leases.queue))
        async with asyncio.TaskGroup() as group:
            self._committing = group.create_task(self._committer.run())
            side = [self._committing, *(group.create_task(c) for c in (*wakers, *upkeep))]
            try:
                if await self._stop.until_asked(self.supervisor.start()):
                    self._size()
                    await self._stop.until_hurried(self._refill())
            finally:
                self.supervisor.state = State.DRAINING
                self.stop()
                try:
                    await hand_over(self, self._stop)
                finally:  # Redis may be away, or a side task may have died meanwhile
                    try:
                        await self.supervisor.stop()
                    finally:
                        await end_tasks(side)

    def _size(self) -> None:
        capacity = self.supervisor.engine_capacity
        self.slots = capacity.max_num_seqs
        if name := self.settings.served_model_name:
            self._served = (name, *capacity.adapters)
        look = self.settings.look_ahead
        look = max(8, self.slots // 4) if look is None else look
        self.limit = min(self.slots + look, self.settings.max_in_flight or self.slots + look)
        # Refilling in groups of half the look-ahead halves the POPs at no loss of occupancy.
        self._low_water = max(1, min(look // 2, self.limit))

    async def _refill(self) -> None:
        while not self.stopping:
            self._changed.clear()
            await self.recover()
            free = self.limit - len(self.in_flight)
            room = self.settings.max_in_flight_bytes - self.in_flight.size
            if free < self._low_water or room <= 0:
                await self._changed.wait()
                continue
            popped = await self.pop(free, max_bytes=room)
            if popped is None:
                continue
            self.admit(popped)
            if popped.suspects and await self._try_suspects(popped):
                continue
            if not popped.deliveries and not popped.more:
                self._hungry.set()
                await self._changed.wait()

    async def _try_suspects(self, popped: Popped) -> bool:
        try:
            return await run_suspects(self, popped)
        except ERRORS as error:
            log.warning("Redis: %s", error, extra={"action": "redis_lost"})
            await asyncio.sleep(REDIS_PAUSE_S)
            return True

    async def pop(
        self, k: int, lists: Sequence[str] | None = None, max_bytes: float = math.inf
    ) -> Popped | None:
        """Lease up to k requests; None if Redis does not answer."""
        try:
            return await self.leases.pop(k, self.slots, lists, max_bytes)
        except ERRORS as error:
            self.leases.errors += 1
            log.warning("Redis: %s", error, extra={"action": "redis_lost"})
            await asyncio.sleep(REDIS_PAUSE_S)
            return None

    async def _wake_on(self, key: str) -> None:
        """Wake the refill when a message arrives while it found nothing."""
        while True:
            await self._hungry.wait()
            try:
                if await self.leases.wait_for_message(key):
                    self._hungry.clear()
                    self._changed.set()
            except ERRORS:
                await asyncio.sleep(REDIS_PAUSE_S)

    # -- one request --------------------------------------------------------------

    def admit(self, popped: Popped) -> None:
        """Start every delivery at once; the engine's own scheduler queues what is ahead."""
        for delivery in popped.deliveries:
            self.counts.popped += 1
            if twin := self.in_flight.twin(delivery):
                # Its lease was swept although it runs here, or a client sent it twice. The
                # earlier lease may be lost, and with it the right to fail: the new one answers.
                self._committer.put(Ending(self.in_flight.exchange(twin, delivery), ""))
                continue
            running = self.in_flight.add(delivery)
            left = math.inf if delivery.deadline is None else delivery.deadline - popped.now
            if left <= 0:
                why = RequestFailed("not started before its deadline", code="expired")
                self._end(running, failed(delivery, why, "expired"))
                continue
            running.task = asyncio.create_task(self._serve(running, popped.now))
            if left < math.inf:
                running.timer = asyncio.get_running_loop().call_later(
                    left, self.in_flight.abort, [running], "expired"
                )

    async def _serve(self, running: Running, popped_at: float) -> None:
        try:
            engine = self.supervisor.engine
            ending = await serve(running, engine, self._served, popped_at)
            self._end(running, ending)
            if ending.outcome == "completed":  # any other may never have been in the engine
                self.supervisor.survived()
        except EngineDead as error:
            if not self._crashed:
                log.error("engine died: %s", error, extra={"action": "engine_dead"})
            running.died = error.inside
            self._crashed.append(running)
            self._changed.set()
        except asyncio.CancelledError:
            if running.abort in ABORTS:
                why = RequestFailed(ABORTS[running.abort], code=running.abort)
                self._end(running, failed(running.delivery, why, running.abort))
            elif running.abort == "died":
                running.died = True
                self._crashed.append(running)
                self._changed.set()
            elif not running.abort:
                why = RequestFailed("the engine gave this request up")
                self._end(running, failed(running.delivery, why))
        except Exception as error:
            rid = running.delivery.request_id
            log.exception("request %s failed", rid, extra={"action": "request_error"})
            why = RequestFailed(f"{type(error).__name__}: {error}")
            self._end(running, failed(running.delivery, why))

    def _end(self, running: Running, ending: Ending) -> None:
        running.ended = True
        if ending.delivery is not running.delivery:  # exchanged since it began
            ending = replace(ending, delivery=running.delivery)
        self._committer.put(ending)

    def _committed(self, endings: Sequence[Ending]) -> None:
        for ending in endings:
            self.in_flight.drop(ending.delivery.lease)
            self.counts.committed(ending)
        if self.on_committed is not None:
            self.on_committed(endings)
        self._changed.set()

    def poke(self) -> None:
        """Look at the queue again, whatever woke us."""
        self._changed.set()

    # -- deaths and suspects --------------------------------------------------------

    async def recover(self) -> None:
        """If the engine died, hand back what was in it and rebuild it, unless stopping.

        Raises:
            EngineDead: it cannot be rebuilt.
        """
        if not self._crashed and not self.supervisor.dead():
            return
        in_use = bool(self._crashed)
        await self.settle()
        await self.hand_back_crashed()
        if not self.stopping:
            await self._stop.until_asked(self.supervisor.rebuild(in_use=in_use))

    async def hand_back_crashed(self) -> None:
        """Hand back what ran when the engine died; what was inside counts a death."""
        crashed, self._crashed = self._crashed, []
        leases = [r.delivery.lease for r in crashed if r.died]
        # Engines admit in order: what is beyond the slots had not been in the engine. Whoever
        # stops us may have told the engine's processes, too: that is nobody's fault.
        inside = 0 if self.stopping else self.slots
        died = frozenset(sorted(leases, key=lease_number)[:inside])
        await self.hand_back(crashed, died)

    async def settle(self) -> None:
        """Wait until nothing runs: every request ended, crashed or was aborted.

        Not once the worker is to stop, for it may not wait that long.
        """
        while (tasks := self.in_flight.tasks()) and not self.stopping:
            await self._stop.until_asked(asyncio.wait(tasks))
        await self._stop.until_asked(self.flush())

    async def flush(self) -> None:
        """Wait until every ending is in Redis, or cannot get there: the committer died."""
        flushing = asyncio.create_task(self._committer.flush())
        await asyncio.wait([flushing, self._committing], return_when=asyncio.FIRST_COMPLETED)
        flushing.cancel()

    # -- stopping ---------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether the worker takes nothing more."""
        return self._stop.asked.is_set()

    def stop(self) -> None:
        """Take nothing more; what runs may finish within the drain timeout."""
        self._stop.ask()
        self._changed.set()

    def hurry(self) -> None:
        """Hand everything back at once."""
        self.stop()
        self._stop.hurry()

    async def hand_back(self, which: Sequence[Running], died: frozenset[str]) -> None:
        """Release leases; `died` are those that were inside an engine when it died."""
        if which:
            self.counts.handed_back += len(which)
            await self.leases.release([r.delivery for r in which], died)
            for running in which:
                self.in_flight.drop(running.delivery.lease)
