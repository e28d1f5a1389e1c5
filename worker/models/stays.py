"""Runs the stays of several models in one worker, one after the other.

A stay is a whole drain of one model's queue, from the start of its engine to its stop. So a swap is
a stop and a start, and what holds for them holds for a swap: running requests are finished or
handed back, and a kill at any moment loses nothing. `choose` (policy.py) decides when a stay ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from contract.redis.connect import connect
from worker.drain.announcement import without_secrets
from worker.drain.counts import Counts
from worker.drain.drain import Drain
from worker.drain.events import EngineReady
from worker.drain.keeper import EngineKeeper
from worker.drain.lifecycle import State, end_tasks
from worker.drain.scripts import ERRORS
from worker.models.adapters import ModelAdapters
from worker.models.announced import AnnouncedModels, text_of
from worker.models.backlog import Backlog, BacklogReads
from worker.models.companions import Companions
from worker.models.config import Model
from worker.models.policy import Stay, Swap, Terms, choose
from worker.models.residence import with_residences
from worker.models.tail import Tail
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Runs one drain until it has stopped; calls the callable with the drain before the drain starts.
RunDrain = Callable[[WorkerSettings, Callable[[Drain], None]], Awaitable[None]]

#: Seconds between two decisions.
EVERY_S = 1.0
#: Seconds between two checks of the running requests that a swap waits for.
TAIL_S = 0.1
#: Least seconds after which a claim expires, if its worker dies during the swap.
CLAIM_S = 120.0


class Stays:
    """The stays of a worker with the models of WARMQ_MODELS."""

    def __init__(
        self, models: Mapping[str, Model], worker_id: str, run: RunDrain, run_more: RunDrain
    ) -> None:
        """`run_more` runs the drain of a model that is loaded together with another one."""
        self._models, self._residences = with_residences(models)
        together = {name: each.loaded_with for name, each in self._residences.items()}
        self._companions = Companions(
            self._models, {name: main for name, main in together.items() if main}, run_more
        )
        self._keepers = {name: each.keeper(name) for name, each in self._residences.items()}
        self._worker_id = worker_id
        self._run = run
        self._queues = {name: each.settings.queue_to_drain for name, each in models.items()}
        any_settings = next(iter(models.values())).settings
        url = any_settings.redis_url.get_secret_value()
        name = f"warmq-{worker_id}-models"
        client = connect(url, name, 0, any_settings.redis_timeout_s)
        self._reads = BacklogReads(client, any_settings.result_ttl_ms)
        #: The expected seconds from the decision to load a model until it is ready.
        self._swap_s: dict[str, float] = {}
        self._announced = AnnouncedModels(self._queues)
        self._adapters = ModelAdapters(self._models)
        self._counts: dict[str, Counts] = {}
        self._rates: dict[str, float] = {}
        self._stopping = False
        self._next: Swap | None = None
        self._began = 0.0
        #: The last error of a decision that was logged.
        self._reported = ""
        #: The slots of the model that was loaded last.
        self._slots = 1
        #: The total of the loaded model's tokens when its stay began.
        self._tokens_before = 0

    def stop(self) -> None:
        """Let the present stay be the last one; its drain is stopped by the caller."""
        self._stopping = True

    async def run(self) -> None:
        """Run stays until the worker stops.

        Raises:
            Exception: the only model cannot be loaded, or none of several models can.
        """
        for name, residence in self._residences.items():
            log.info("model %s is %s", name, residence, extra={"action": "residence"})
        await self._note_adapters()
        swap = await self._first()
        try:
            while not self._stopping:
                self._announced.begin(swap.model, swap.reason)
                self._note_sleep()
                swap = await self._stay(self._models[swap.model]) or await self._retry()
        finally:
            await self._end_claim(swap.model)
            if self._next is not None:  # a stop came during a swap
                await self._in_thread(lambda: self._reads.leave(self._worker_id))
            await self._end_kept()
            self._reads.close()

    async def _first(self) -> Swap:
        """Return the swap to the first model: the one with the most work, else the first named."""
        swap = await self._most_needed()
        first = self._companions.main_models()[0]
        return swap or Swap(first, "it is named first, and nothing waits")

    async def _most_needed(self) -> Swap | None:
        """Return the swap of a worker without a model, if work waits for one that may be loaded."""
        swap = None
        with self._reporting():
            for _ in self._models:  # another worker may claim a queue first
                if (backlog := await self._backlog()) is None:
                    break
                demands = {m: d for m, d in backlog.demands.items() if self._announced.may_load(m)}
                swap = choose(Stay(None, slots=self._slots), demands, self._terms())
                if swap is None or await self._claim(swap, backlog):
                    break
        return swap

    async def _retry(self) -> Swap:
        """Return the next swap after a model could not be loaded."""
        while not self._stopping:
            if swap := await self._most_needed():
                return swap
            mains = self._companions.main_models()
            if free := [name for name in mains if self._announced.may_load(name)]:
                return Swap(free[0], "no other model has work")
            await asyncio.sleep(EVERY_S)
        return Swap(next(iter(self._models)), "")

    async def _stay(self, model: Model) -> Swap | None:
        """Run one stay; return the swap that ended it, None if the model cannot be loaded."""
        self._next, self._began = None, time.monotonic()
        deciding: list[asyncio.Task[None]] = []

        def begin(drain: Drain) -> None:
            drain.models = self._announced.fields
            drain.supervisor.keeper = self._keeper(model.name)
            if (counts := self._counts.get(model.name)) is not None:
                drain.go_on_from(counts)
            self._counts[model.name] = drain.counts
            drain.earlier = [counts for name, counts in self._counts.items() if name != model.name]
            drain.earlier += self._companions.totals.values()
            if self._stopping:  # the stop came between two stays
                drain.begin_stop()
            drain.events.subscribe(EngineReady, lambda event: self._ready(model, event))
            deciding.append(asyncio.create_task(self._decide(model, drain)))

        log.info(
            "model %s is loaded, of %s", model.name, ", ".join(self._models),
            extra={"action": "model_load", "model": model.name},
        )  # fmt: skip
        try:
            await self._run(model.settings, begin)
        except Exception as error:
            if self._stopping or len(self._companions.main_models()) == 1:
                raise
            if self._next is not None:  # the leases of requests that were not handed back expire
                log.warning("model %s was left with an error: %s", model.name, text_of(error),
                            extra={"action": "swap_error", "model": model.name})  # fmt: skip
            else:
                self._postpone(model, error)
        finally:
            await end_tasks(deciding)
            queues = [self._queues[name] for name in self._companions.members(model.name)]
            await self._companions.wait_for_end()
            await self._end_claim(model.name)
            await self._in_thread(lambda: self._reads.note_left(queues))
        return self._next

    def _keeper(self, name: str) -> EngineKeeper:
        """Return the keeper of a model's engine; another one if its thread does not answer."""
        keeper = self._keepers[name]
        if keeper.stuck:
            self._keepers[name] = keeper = EngineKeeper()
        return keeper

    def _note_sleep(self) -> None:
        self._announced.note_sleep({name: each.failure for name, each in self._keepers.items()})

    async def _end_kept(self) -> None:
        """Shut down the engines that are kept for later stays."""
        await asyncio.gather(*(each.end() for each in self._keepers.values()))

    async def _end_claim(self, name: str) -> None:
        queue = self._queues[name]
        await self._in_thread(lambda: self._reads.end_claim(queue, self._worker_id))

    def _ready(self, model: Model, event: EngineReady) -> None:
        """Note the end of a swap: the engine runs requests."""
        self._note_sleep()
        if not event.rebuilt:
            seconds = time.monotonic() - self._began
            self._swap_s[model.name] = self._keepers[model.name].next_load_s(seconds)
            self._announced.note_loaded(model.name, seconds)
        self._companions.begin(model.name)
        self._began = time.monotonic()
        counts = self._counts[model.name]
        self._tokens_before = counts.prompt_tokens + counts.completion_tokens

    def _postpone(self, model: Model, error: Exception) -> None:
        """Postpone the next try of a model that cannot be loaded; raise if all are postponed."""
        why = without_secrets(text_of(error), model.settings)
        pause_s = self._announced.note_failed(model.name, why, time.monotonic() - self._began)
        if not any(map(self._announced.may_load, self._models)):
            raise error
        log.error(
            "model %s cannot be loaded, its requests wait: %s; it is tried again in %.0f s",
            model.name, why, pause_s,
            extra={"action": "model_failed", "model": model.name},
        )  # fmt: skip

    async def _decide(self, model: Model, drain: Drain) -> None:
        """Once a second decide whether this stay ends; then stop the drain."""
        while not drain.lifecycle.stopping:
            await asyncio.sleep(EVERY_S)
            if drain.lifecycle.state is not State.READY or drain.paused or self._stopping:
                continue
            with self._reporting():
                await self._decide_now(model, drain)
        if not drain.lifecycle.swapping:
            self._companions.leave()
            # The worker stops: sleeping engines end while its last requests run.
            await self._end_kept()

    async def _note_adapters(self) -> None:
        """Announce the adapters of all models; their folders may change."""
        names = await self._in_thread(self._adapters.look)
        if names is not None:
            self._announced.note_adapters(names)

    async def _decide_now(self, model: Model, drain: Drain) -> None:
        self._measure(model, drain)
        await self._note_adapters()
        backlog = await self._backlog()
        if backlog is None or drain.lifecycle.stopping:
            return
        swap = self._choice(model, drain, backlog)
        if swap is None or not await self._claim(swap, backlog):
            return
        if drain.lifecycle.stopping:  # since the backlog was read
            await self._end_claim(swap.model)
            return
        log.info(
            "swapping from model %s to %s: %s", model.name, swap.model, swap.reason,
            extra={"action": "swap", "from": model.name, "model": swap.model},
        )  # fmt: skip
        self._next, self._began = swap, time.monotonic()
        drain.swap(why := f"swapping to {swap.model}: {swap.reason}")
        self._companions.leave(why)
        await self._wait_for_tail(drain)

    async def _wait_for_tail(self, drain: Drain) -> None:
        """Hand the last running requests back if that costs less than waiting for their ends.

        The drain ends with them; this task is then cancelled.
        """
        slots = drain.limits.slots
        tail = Tail(slots, time.monotonic())
        while drain.lifecycle.swapping and not drain.lifecycle.hurrying:
            await asyncio.sleep(TAIL_S)
            running = list(drain.in_flight)[:slots]
            if tail.look(running, time.monotonic()):
                log.info(
                    "running requests handed back before the swap: %d; idle slot-seconds: %.1f",
                    len(running), tail.idle_s, extra={"action": "swap_hands_back"},
                )  # fmt: skip
                drain.lifecycle.hurry()

    def _choice(self, model: Model, drain: Drain, backlog: Backlog) -> Swap | None:
        demands = {
            name: demand for name, demand in backlog.demands.items()
            if name == model.name or self._announced.may_load(name)
        }  # fmt: skip
        in_flight = len(drain.in_flight) + self._companions.in_flight()
        has_work = bool(demands[model.name].requests or in_flight)
        seconds = time.monotonic() - self._began
        self._slots = max(1, drain.limits.slots)
        return choose(Stay(model.name, seconds, has_work, self._slots), demands, self._terms())

    def _measure(self, model: Model, drain: Drain) -> None:
        """Note the tokens per second of this stay, from which deadlines' slack is computed."""
        counts, seconds = drain.counts, time.monotonic() - self._began
        if counts.completion_tokens and seconds > EVERY_S:
            tokens = counts.prompt_tokens + counts.completion_tokens - self._tokens_before
            self._rates[model.name] = tokens / seconds

    async def _claim(self, swap: Swap, backlog: Backlog) -> bool:
        life_s = max(CLAIM_S, 3 * self._swap_s.get(swap.model, 0.0))
        queue, claims_read = self._queues[swap.model], backlog.claims[swap.model]
        made = await self._in_thread(
            lambda: self._reads.claim(queue, self._worker_id, self._slots, life_s, claims_read)
        )
        if made is None:  # Redis may have made it although its reply is lost
            await self._end_claim(swap.model)
        return bool(made)

    async def _backlog(self) -> Backlog | None:
        backlog = await self._in_thread(
            lambda: self._reads.backlog(self._queues, self._worker_id, self._rates)
        )
        return backlog and replace(backlog, demands=self._companions.merged(backlog.demands))

    async def _in_thread(self, call: Callable[[], T]) -> T | None:
        """Call Redis in a thread; return None if that fails."""
        with self._reporting():
            return await asyncio.to_thread(call)
        return None

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Log an error and go on, so that an unforeseen one does not end decisions."""
        try:
            yield
        except Exception as error:
            if str(error) != self._reported:  # once: the drain reports an outage, too
                self._reported = str(error)
                trace = None if isinstance(error, ERRORS) else error
                log.warning("no swap is decided: %s", text_of(error), exc_info=trace,
                            extra={"action": "swap_waits"})  # fmt: skip

    def _terms(self) -> dict[str, Terms]:
        return {
            name: each.terms(self._swap_s.get(name), self._rates.get(name, 0.0) / self._slots)
            for name, each in self._models.items()
        }
