"""The requests of one worker, from lease to ending: admitted, run, committed or handed back."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from contract.errors import EngineDead, RequestFailed
from worker.drain.committer import Committer
from worker.drain.counts import Counts, Means
from worker.drain.endings import Ending
from worker.drain.event_log import log_events
from worker.drain.events import Committed, EngineDied, Events, HandedBack, Leased
from worker.drain.in_flight import ABORTS, InFlight, Running
from worker.drain.leases import Leases, Popped, lease_number
from worker.drain.lifecycle import Lifecycle
from worker.drain.log_fields import about
from worker.drain.others import Others
from worker.drain.outage import Outage
from worker.drain.room import Room
from worker.drain.scripts import ERRORS
from worker.drain.sequences import Sequences
from worker.drain.serve import failed, serve
from worker.drain.supervisor import Supervisor
from worker.drain.turns import Turns
from worker.drain.wakeup import REDIS_PAUSE_S, Wakeup
from worker.engine import Engine
from worker.engine.preparation import Preparing
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)


class Serving:
    """What can be done with requests; worker/drain/loop.py decides when."""

    def __init__(
        self,
        settings: WorkerSettings,
        leases: Leases,
        make: Callable[[], Engine],
        others: Others,
        part_of: str | None,
    ) -> None:
        self.settings = settings
        self.others = others
        #: The worker whose engine this is, if it is not this one's.
        self.part_of = part_of
        self.leases = leases
        self.events = Events()
        self.counts = Counts(self.events)
        log_events(self.events, leases.queue)
        self.lifecycle = Lifecycle(settings.drain_timeout_s, leases.give_up_in)
        self.supervisor = Supervisor(
            make, settings.rebuild_tries, settings.max_deaths, self.lifecycle, self.events, others
        )
        self.outage = Outage(self.events)
        self.means = Means(self.counts)
        self.in_flight = InFlight()
        self.wakeup = Wakeup(leases)
        self.room = Room()  # none before the engine is ready
        self._sequences = Sequences(lambda: self.room.slots_of_many, self.wakeup.poke)
        self._turns = Turns()
        #: Those of the requests in flight that wait for what is done one after the other.
        self.preparing = Preparing(self.wakeup.poke)
        #: Names of the models and adapters served; empty where any will do.
        self._served: tuple[str, ...] = ()
        #: Names of the adapters that the engine has, beside its model.
        self.adapters: tuple[str, ...] = ()
        self._crashed: list[Running] = []
        # A slot is filled again once Redis has the result: what a killed worker has computed in
        # vain is never more than slots and look-ahead. Answers of one length end together.
        self._committer = Committer(
            leases, self._committed, lambda: min(len(self.in_flight), self.room.low_water)
        )
        self._committing: asyncio.Task[None]

    @property
    def served(self) -> str:
        """The model's name as metrics and announcements tell it; '' while it has none."""
        settings, capacity = self.settings, self.supervisor.capacity
        known = capacity.model if capacity else settings.model
        return settings.served_model_name or known or ""

    def measure_room(self) -> None:
        """Size the room by what the engine that has started can take."""
        capacity = self.supervisor.engine_capacity
        self.room = Room.of(capacity, self.settings)
        self.adapters = tuple(capacity.adapters)
        if name := self.settings.served_model_name:
            self._served = (name, *capacity.adapters)

    async def pop(
        self, k: int, lists: Sequence[str] | None = None, max_bytes: float = math.inf
    ) -> Popped | None:
        """Lease up to k requests; None if Redis does not answer."""
        try:
            many = max(0, self.room.many_waiting - self._sequences.waiting)
            room = self.room
            popped = await self.leases.pop(
                k, room.slots, lists, max_bytes, many, room.context,
                self.preparing.crowded(room.preparing_each),
            )  # fmt: skip
        except ERRORS as error:
            self.outage.lost(error)
            await asyncio.sleep(REDIS_PAUSE_S)
            return None
        self.outage.over()
        return popped

    # -- one request --------------------------------------------------------------

    def admit(self, popped: Popped) -> None:
        """Start every delivery at once; the engine's own scheduler queues what is ahead."""
        if popped.deliveries:
            self.events.publish(Leased(popped.deliveries, popped.now))
        for delivery in popped.deliveries:
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
            ending = await serve(
                running, engine, self._served, popped_at, self.events, self._sequences,
                self._turns, self.settings.max_line_bytes, self.preparing,
            )  # fmt: skip
            self._end(running, ending)
            if ending.outcome == "completed":  # any other may never have been in the engine
                self.supervisor.survived()
        except EngineDead as error:
            if not self._crashed:
                self.events.publish(EngineDied(str(error)))
            running.died = error.inside
            self._crash(running)
        except asyncio.CancelledError:
            if running.abort in ABORTS:
                why = RequestFailed(ABORTS[running.abort], code=running.abort)
                self._end(running, failed(running.delivery, why, running.abort))
            elif running.abort == "died":
                running.died = True
                self._crash(running)
            elif not running.abort:
                why = RequestFailed("the engine gave this request up")
                self._end(running, failed(running.delivery, why))
        except Exception as error:
            delivery = running.delivery
            fields = about(delivery, "request_error")
            log.exception("request %s failed", delivery.request_id, extra=fields)
            why = RequestFailed(f"{type(error).__name__}: {error}")
            self._end(running, failed(running.delivery, why))

    def _end(self, running: Running, ending: Ending) -> None:
        running.ended = True
        if ending.delivery is not running.delivery:  # exchanged since it began
            ending = replace(ending, delivery=running.delivery)
        self._committer.put(ending)

    def _crash(self, running: Running) -> None:
        self._crashed.append(running)
        self.wakeup.poke()

    def _committed(self, endings: Sequence[Ending]) -> None:
        for ending in endings:
            self.in_flight.drop(ending.delivery.lease)
        self.events.publish(Committed(endings))
        self.wakeup.poke()

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
        if not self._crashed:
            self.events.publish(EngineDied("with no request in it"))
        await self.hand_back_crashed()
        if not self.lifecycle.stopping:
            await self.lifecycle.until_asked(self.supervisor.rebuild(in_use=in_use))

    async def hand_back_crashed(self) -> None:
        """Hand back what ran when the engine died; what was inside counts a death."""
        crashed, self._crashed = self._crashed, []
        leases = [r.delivery.lease for r in crashed if r.died]
        # Engines admit in order: what is beyond the slots had not been in the engine. Whoever
        # stops us may have told the engine's processes, too: that is nobody's fault.
        inside = 0 if self.lifecycle.stopping else self.room.slots
        died = frozenset(sorted(leases, key=lease_number)[:inside])
        await self.hand_back(crashed, died)

    async def settle(self) -> None:
        """Wait until nothing runs: every request ended, crashed or was aborted.

        Not once the worker is to stop, for it may not wait that long.
        """
        while (tasks := self.in_flight.tasks()) and not self.lifecycle.stopping:
            await self.lifecycle.until_asked(asyncio.wait(tasks))
        await self.lifecycle.until_asked(self.flush())

    async def flush(self) -> None:
        """Wait until every ending is in Redis, or cannot get there: the committer died."""
        flushing = asyncio.create_task(self._committer.flush())
        await asyncio.wait([flushing, self._committing], return_when=asyncio.FIRST_COMPLETED)
        flushing.cancel()

    async def hand_back(self, which: Sequence[Running], died: frozenset[str]) -> None:
        """Release leases; `died` are those that were inside an engine when it died."""
        if which:
            deliveries = [r.delivery for r in which]
            await self.leases.release(deliveries, died)
            for delivery in deliveries:
                self.in_flight.drop(delivery.lease)
            self.events.publish(HandedBack(deliveries, died))
