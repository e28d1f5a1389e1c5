"""Connects the parts of one worker's drain, and takes each request from lease to ending."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from contract.errors import EngineDead, RequestFailed
from worker.drain import events
from worker.drain.admission import AdmissionLimits, SequenceLimit
from worker.drain.committer import Committer
from worker.drain.counts import Averages, Counts
from worker.drain.endings import Ending, failed, log_extra
from worker.drain.event_log import log_events
from worker.drain.events import Events, Outage
from worker.drain.in_flight import InFlight, Running, perhaps_inside
from worker.drain.known import Offers
from worker.drain.leases import Leases, Popped, lease_number
from worker.drain.lifecycle import Lifecycle
from worker.drain.refill import Refill
from worker.drain.scripts import ERRORS
from worker.drain.serve import Serving
from worker.drain.supervisor import Supervisor
from worker.drain.wakeup import REDIS_PAUSE_S, Wakeup
from worker.engine import Engine, RequestReturned
from worker.engine.preparation import PreparingRequests
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)


class Drain:
    """Runs requests of one queue in one engine; worker/drain/loop.py decides when."""

    #: The lists that POP takes first in their tenants' turns (deadlines.py).
    urgent: tuple[str, ...] = ()

    def __init__(
        self,
        settings: WorkerSettings,
        leases: Leases,
        make: Callable[[], Engine],
    ) -> None:
        """Prepare; `make` makes the engine, whose `build()` the supervisor calls later."""
        self.settings = settings
        self.leases = leases
        self.events = Events()
        self.counts = Counts(self.events)
        log_events(self.events, leases.queue, settings.see_engine_log)
        self.lifecycle = Lifecycle(
            settings.drain_timeout_s, leases.scripts.give_up_in, settings.swap_drain_s
        )
        self.supervisor = Supervisor(
            make, settings.rebuild_tries, settings.max_deaths, self.lifecycle, self.events
        )
        self.outage = Outage(self.events)
        self.averages = Averages(self.counts)
        self.in_flight = InFlight()
        self.wakeup = Wakeup(leases.wait_for_message)
        self.limits = AdmissionLimits()  # none before the engine is ready
        self.refill = Refill()
        self._sequences = SequenceLimit(lambda: self.limits.multi_sequence_slots, self.wakeup.poke)
        #: The requests in flight that wait for the preparation of earlier ones.
        self.preparing = PreparingRequests(self.wakeup.poke)
        self._serving = Serving(
            self.supervisor, self.events, self._sequences, self.preparing, settings.max_line_bytes
        )
        #: The additional fields of the announcement with WARMQ_MODELS, among them `models`.
        self.models: Mapping[str, Any] = {}
        #: The totals of this process's drains of its other models.
        self.earlier: list[Counts] = []
        #: The reason of a swap that has begun.
        self.swap_reason = ""
        #: What ran when the engine died, and what the engine has returned: to be handed back.
        self._crashed, self._returned = list[Running](), list[Running]()
        # A slot is refilled when its result is in Redis, so a killed worker loses at most the work
        # in its slots and look-ahead. Answers of the same length end in the same step, so endings
        # are committed together: when `low_water` of them wait, or when every request in flight
        # has ended.
        self._committer = Committer(
            leases, self._committed, lambda: min(len(self.in_flight), self.limits.low_water)
        )
        self._committing: asyncio.Task[None]
        self.paused = False
        self.idle = asyncio.Event()
        #: The counts of ended and of handed back requests when the stop began.
        self._before_stop = (0, 0)

    @property
    def served(self) -> str:
        """The model's name in metrics and announcements; '' while it is unknown."""
        settings, capacity = self.settings, self.supervisor.capacity
        name = settings.model_name
        if capacity is not None and capacity.model != settings.model:
            name = capacity.model  # the model that the engine's server lists
        return settings.served_model_name or name or ""

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the engine's LoRA adapters, also of those that are not loaded now."""
        if (capacity := self.supervisor.capacity) is None:
            return ()
        return (*capacity.adapters, *(capacity.on_demand() if capacity.on_demand else ()))

    @property
    def offers(self) -> Offers | None:
        """The answers of the engine that may be reused; None if they are not noted."""
        return self._serving.offers

    def set_limits(self) -> None:
        """Set the limits and the served names from the engine that has started."""
        capacity = self.supervisor.engine_capacity
        self.limits = AdmissionLimits.of(capacity, self.settings)
        self._serving.offers = Offers.of(self.settings, capacity, self.served)
        name = self.settings.served_model_name
        if name and capacity.on_demand is None:  # else the engine knows which adapters there are
            self._serving.names = (name, *capacity.adapters)

    async def pop(
        self, count: int, lists: Sequence[str] | None = None, max_bytes: float = math.inf
    ) -> Popped | None:
        """Lease up to `count` requests; return None if Redis does not answer."""
        limits = self.limits
        most_multi = max(0, limits.multi_sequence_waiting - self._sequences.waiting)
        busy = self.preparing.busy_tenants(limits.preparing_each)
        try:
            popped = await self.leases.pop(
                count, limits.slots, lists, max_bytes, most_multi, limits.context, busy, self.urgent
            )
        except ERRORS as error:
            self.outage.lost(error)
            await asyncio.sleep(REDIS_PAUSE_S)
            return None
        self.outage.over()
        self.refill.asked(popped.deliveries)
        return popped

    # -- one request --------------------------------------------------------------

    def admit(self, popped: Popped) -> None:
        """Start a task for each delivery; the look-ahead waits in the engine's scheduler."""
        if popped.deliveries:
            self.events.publish(events.Leased(popped.deliveries, popped.now))
        loop = asyncio.get_running_loop()
        for delivery in popped.deliveries:
            if repeated := self.in_flight.same_request(delivery):
                # The lease was swept although the request runs here, or a client sent the request
                # twice. A lost lease may no longer write an error, so the request ends with the
                # new lease.
                earlier = self.in_flight.replace_delivery(repeated, delivery)
                self._committer.put(Ending(earlier, ""))
                continue
            running = self.in_flight.add(delivery)
            left_s = math.inf if delivery.deadline is None else delivery.deadline - popped.now
            if left_s <= 0:
                self._fail(running, "not started before its deadline", "expired", "expired")
                continue
            running.task = loop.create_task(self._serve(running, popped.now))
            if left_s < math.inf:
                running.timer = loop.call_later(left_s, self.in_flight.abort, [running], "expired")

    async def _serve(self, running: Running, popped_at: float) -> None:
        try:
            ending = await self._serving.run(running, popped_at)
            self._end(running, ending)
            if ending.outcome == "completed":  # other requests may not have reached the engine
                self.supervisor.note_completed()
        except EngineDead as error:
            if not self._crashed:
                self.events.publish(events.EngineDied(str(error)))
            self._crash(running, inside=error.inside)
        except RequestReturned:
            self._returned.append(running)
            self.wakeup.poke()
        except asyncio.CancelledError:
            if running.error:
                self._fail(running, running.error, running.abort, running.abort)
            elif running.abort == "died":
                self._crash(running, inside=True)
            elif not running.abort:
                self._fail(running, "the engine gave this request up")
        except Exception as error:
            delivery = running.delivery
            extra = log_extra(delivery, "request_error")
            log.exception("request %s failed", delivery.request_id, extra=extra)
            self._fail(running, f"{type(error).__name__}: {error}")

    def _fail(
        self, running: Running, text: str, outcome: str = "failed", code: str | None = None
    ) -> None:
        self._end(running, failed(running.delivery, RequestFailed(text, code=code), outcome))

    def _end(self, running: Running, ending: Ending) -> None:
        running.ended = True
        if ending.delivery is not running.delivery:  # replaced while the request ran
            ending = replace(ending, delivery=running.delivery)
        self._committer.put(ending)

    def _crash(self, running: Running, inside: bool) -> None:
        running.died = inside
        self._crashed.append(running)
        self.wakeup.poke()

    def _committed(self, endings: Sequence[Ending]) -> None:
        for ending in endings:
            self.in_flight.drop(ending.delivery.lease)
        self.events.publish(events.Committed(endings))
        self.wakeup.poke()

    # -- deaths and suspects --------------------------------------------------------

    async def recover(self) -> None:
        """Hand back a dead engine's requests, and rebuild the engine unless the worker stops.

        Raises:
            EngineDead: the engine cannot be rebuilt.
        """
        if not self._crashed and not self.supervisor.dead():
            return
        in_use = bool(self._crashed)
        await self.settle()
        if not self._crashed:
            self.events.publish(events.EngineDied("with no request in it"))
        await self.hand_back_crashed()
        if not self.lifecycle.stopping:
            await self.lifecycle.until_asked(self.supervisor.rebuild(in_use=in_use))

    async def hand_back_crashed(self) -> None:
        """Hand back the requests that ran when the engine died; those in it count a death."""
        crashed, self._crashed = self._crashed, []
        died = sorted((r for r in crashed if r.died), key=lambda r: lease_number(r.delivery.lease))
        # While the worker stops, the signal may have ended the engine's processes too: then no
        # request counts a death.
        inside = [] if self.lifecycle.stopping else perhaps_inside(died, self.limits.slots)
        await self.hand_back(crashed, frozenset(r.delivery.lease for r in inside))

    async def hand_back_returned(self) -> None:
        """Hand back the requests that the engine has returned; no death is counted."""
        returned, self._returned = self._returned, []
        await self.hand_back(returned, frozenset())

    async def settle(self) -> None:
        """Wait until no request runs and all endings are in Redis, or until a stop begins."""
        while (tasks := self.in_flight.tasks()) and not self.lifecycle.stopping:
            await self.lifecycle.until_asked(asyncio.wait(tasks))
        await self.lifecycle.until_asked(self.flush())

    def commit(self, group: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Start the task that commits endings, and return it."""
        self._committing = group.create_task(self._committer.run())
        return self._committing

    async def flush(self) -> None:
        """Wait until every ending is in Redis, or the committer has failed."""
        flushing = asyncio.create_task(self._committer.flush())
        await asyncio.wait([flushing, self._committing], return_when=asyncio.FIRST_COMPLETED)
        flushing.cancel()

    async def hand_back(self, which: Sequence[Running], died: frozenset[str]) -> None:
        """Release these requests' leases; `died` names the leases that were in a dead engine."""
        if which:
            deliveries = [r.delivery for r in which]
            await self.leases.release(deliveries, died)
            for delivery in deliveries:
                self.in_flight.drop(delivery.lease)
            self.events.publish(events.HandedBack(deliveries, died))

    # -- pausing and stopping -------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Stop or go on taking requests; `idle` is set when paused and nothing is in flight."""
        self.paused = paused
        self.idle.clear()
        self.wakeup.poke()

    def stop(self) -> None:
        """Take no more requests; running ones may finish within WARMQ_DRAIN_TIMEOUT_S."""
        if not self.lifecycle.stopping:
            self.events.publish(events.Stopping(len(self.in_flight), self.settings.drain_timeout_s))
        self.begin_stop()
        self.lifecycle.no_swap()

    def go_on_from(self, before: Counts) -> None:
        """Add the totals of an earlier drain of the same model in this process."""
        self.counts.add(before)
        self.averages = Averages(self.counts)

    def swap(self, reason: str) -> None:
        """Take no more requests, to load another model; `reason` is announced."""
        self.lifecycle.swapping, self.swap_reason = True, reason
        self.begin_stop()

    def hurry(self) -> None:
        """Hand all requests back now."""
        if not self.lifecycle.hurrying:
            self.events.publish(events.Stopping(len(self.in_flight), 0))
        self.begin_stop()
        self.lifecycle.no_swap()
        self.lifecycle.hurry()

    def begin_stop(self) -> None:
        """Stop without publishing an event, for example after the drain has failed."""
        if not self.lifecycle.stopping:
            self._before_stop = self.counts.ended, self.counts.handed_back
        self.lifecycle.stop()
        self.wakeup.poke()

    def drained(self) -> events.Drained:
        """Return how many requests ended and were handed back since the stop began."""
        ended, handed_back = self._before_stop
        return events.Drained(self.counts.ended - ended, self.counts.handed_back - handed_back)
