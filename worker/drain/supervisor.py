"""Builds one engine, and rebuilds it a limited number of times when it dies."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from contract.errors import EngineDead
from worker.drain.events import EngineReady, Events
from worker.drain.keeper import EngineKeeper, kill_engine
from worker.drain.lifecycle import Lifecycle
from worker.engine import Capacity, CountsCachedTokens, Engine, ReportsWaiting
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

#: Half of the seconds before the second try to rebuild an engine; each further pause is twice as
#: long as the pause before.
REBUILD_BACKOFF_S = 1.0
#: If an engine without requests dies later than this after its start (s), its death does not count
#: as one of the deaths in a row.
IDLE_S = 300.0


class EngineShare:
    """One drain's share of an engine that `count` drains feed; number 0 started the engine.

    The drains of the other front ends of the engine are its peers. The methods after `settings` do
    nothing here; worker/process/front_ends.py has a subclass for a drain with peers.
    """

    def __init__(self, number: int = 0, count: int = 1) -> None:
        self.number = number
        self.count = count

    def share(self, capacity: Capacity) -> Capacity:
        """Return the capacity with this share of the slots; the KV cache is not divided."""
        slots = self.of(capacity.max_num_seqs)
        return capacity if self.count == 1 else replace(capacity, max_num_seqs=slots)

    def of(self, amount: int) -> int:
        """Return this drain's share of a number, at least 1.

        If the number is at least `count`, the shares of all drains add up to it.
        """
        return max(1, (amount + self.count - 1 - self.number) // self.count)

    def settings(self, settings: WorkerSettings) -> WorkerSettings:
        """Return the settings with this share of `look_ahead`, which is for a whole worker."""
        if self.count == 1 or not settings.look_ahead:
            return settings
        return settings.model_copy(update={"look_ahead": self.of(settings.look_ahead)})

    def begin(self, engine: Engine) -> None:
        """Let peers use an engine that has started; do not wait for them."""

    async def end(self, *, died: bool) -> None:
        """Let peers leave an engine that is about to be shut down; this takes some seconds.

        If the engine died, the peers' requests in it count a death. They are handed back.
        """

    async def pause(self) -> None:
        """Let peers take no more requests; return when they have none in flight."""

    def resume(self) -> None:
        """Let peers take requests again."""

    async def stop_peers(self) -> None:
        """Stop the peers and wait until they have ended."""


class Supervisor:
    """Owns the engine of one drain; its keeper has the thread that builds it."""

    def __init__(
        self,
        make: Callable[[], Engine],
        rebuild_tries: int,
        max_deaths: int,
        lifecycle: Lifecycle,
        events: Events,
    ) -> None:
        self.peers = EngineShare()
        self.keeper = EngineKeeper()
        self.capacity: Capacity | None = None
        self.deaths = 0
        #: Seconds from SIGTERM to SIGKILL for the processes of the latest engine.
        self.grace_s = 0.0
        self._make = make
        self._tries = rebuild_tries
        self._max_deaths = max_deaths
        self._lifecycle = lifecycle
        self._events = events
        #: Deaths in a row without a completed request.
        self._deaths_in_a_row = 0
        self._ready_at = 0.0
        self._engine: Engine | None = None
        #: Returns the running engine's count of prompt tokens from its prefix cache. This attribute
        #: avoids isinstance() with a protocol, which is slow.
        self._cached: Callable[[], int] | None = None
        self._cached_before = 0
        self._building: Engine | None = None
        #: The present step of a start, and the reason why the latest start or rebuild failed; ''
        #: without a start or failure.
        self._doing = self._failure = ""

    @property
    def why(self) -> str:
        """The reason why no engine runs, or the servers for which an engine waits; else ''."""
        engine = self._engine or self._building
        waits_for = engine.waits_for() if isinstance(engine, ReportsWaiting) else ""
        if self._engine is not None:
            return waits_for
        return "; ".join(filter(None, (self._failure, waits_for or self._doing)))

    @property
    def failed(self) -> bool:
        """Whether the latest start failed for another reason than the worker's stop."""
        return bool(self._failure)

    @property
    def engine(self) -> Engine:
        """The running engine."""
        if self._engine is None:
            raise EngineDead("the engine is not running", inside=False)
        return self._engine

    @property
    def running(self) -> bool:
        """Whether an engine has started and is not being replaced or ended."""
        return self._engine is not None

    def dead(self) -> bool:
        """Return whether the engine has died, with or without requests in it."""
        return self._engine is not None and self._engine.dead()

    @property
    def engine_capacity(self) -> Capacity:
        """The capacity of the engine; raises EngineDead before the first start."""
        if self.capacity is None:
            raise EngineDead("the engine has not started")
        return self.capacity

    def cached_prompt_tokens(self) -> int:
        """Return how many prompt tokens were in prefix caches, 0 if the engine has no count."""
        return self._cached_before + (self._cached() if self._cached else 0)

    async def start(self) -> Capacity:
        """Build and start the engine; an error is not retried: wrong settings stay wrong."""
        began = time.monotonic()
        try:
            engine, capacity = await self._start_engine()
        except Exception as error:
            self._fail(f"the engine failed to start: {error}")
            raise
        finally:
            self._doing = ""
        self._engine, self._building, self._failure = engine, None, ""
        self._cached_before = self.cached_prompt_tokens()  # each engine counts from 0
        self._cached = (
            engine.cached_prompt_tokens if isinstance(engine, CountsCachedTokens) else None
        )
        self.capacity = capacity = self.peers.share(capacity)
        self._ready_at = time.monotonic()
        self._lifecycle.engine_ready()
        seconds = self._ready_at - began
        self._events.publish(EngineReady(seconds, capacity, rebuilt=self.deaths > 0))
        self.peers.begin(engine)
        return capacity

    async def _start_engine(self) -> tuple[Engine, Capacity]:
        keeper = self.keeper
        if (kept := await self._wake()) is not None:
            return kept
        self._doing = "preparing the engine"
        self._building = engine = await keeper.in_thread(self._make)
        self.grace_s = engine.grace_s
        try:
            self._doing = "loading the model"
            keeper.before_build(engine)
            await keeper.in_thread(engine.build)
            self._doing = "starting the engine"
            capacity = await engine.start()
            await keeper.after_start(engine)
            return engine, capacity
        except Exception:
            self._building = None
            await keeper.shut_down(engine)  # a half-built engine must release the device
            raise

    async def _wake(self) -> tuple[Engine, Capacity] | None:
        """Wake the engine that the keeper has kept, or shut it down; return it if it is ready."""
        if (kept := self.keeper.take()) is None:
            return None
        self._doing = "waking the engine"
        self._building = engine = kept[0]
        self.grace_s = engine.grace_s
        if await self.keeper.wake(engine):
            return kept
        self._building = None
        await self.keeper.shut_down(engine)
        return None

    def _fail(self, why: str) -> EngineDead:
        """Keep a reason for announcements, and return it as an error."""
        if not self._lifecycle.stopping:
            self._failure = why
        return EngineDead(why)

    async def rebuild(self, *, in_use: bool) -> Capacity:
        """Replace a dead engine; `in_use`: the engine died with requests in it.

        Raises:
            EngineDead: `rebuild_tries` starts failed in a row, or engines died too many times in
                a row without completing a request.
        """
        self.deaths += 1
        self._lifecycle.engine_dead()
        engine, self._engine = self._engine, None
        await self.peers.end(died=True)
        if engine is not None:
            await self.keeper.shut_down(engine)
        if self.keeper.stuck:
            raise self._fail("the dead engine's shutdown does not end, so none can be built")
        if in_use or time.monotonic() - self._ready_at < IDLE_S:
            self._deaths_in_a_row += 1
        if self._deaths_in_a_row > self._deaths_allowed():
            raise self._fail(
                f"the engine died {self._deaths_in_a_row} times in a row without completing a "
                "request"
            )
        last_error: Exception | None = None
        for tried in range(self._tries):
            await asyncio.sleep(REBUILD_BACKOFF_S * 2**tried if tried else 0)
            text, extra = "rebuilding the engine, try %d of %d", {"action": "engine_rebuild"}
            log.warning(text, tried + 1, self._tries, extra=extra)
            try:
                return await self.start()
            except Exception as error:  # after any library's error the next try may succeed
                log.exception("the engine could not be rebuilt", extra={"action": "engine_failed"})
                last_error = error
        raise self._fail(
            f"the engine could not be rebuilt in {self._tries} tries: {last_error}"
        ) from last_error

    def note_completed(self) -> None:
        """Note that a request completed: deaths in a row count from 0 again."""
        self._deaths_in_a_row = 0

    def _deaths_allowed(self) -> int:
        # Suspects that fill the engine run in halves, down to one poison, which then runs alone
        # once more: possibly no request completes during log2(slots) + 2 deaths.
        slots = self.capacity.max_num_seqs if self.capacity else 1
        return self._tries + self._max_deaths + math.ceil(math.log2(slots)) + 2

    def kill(self) -> None:
        """Kill an engine that hangs; its requests fail with EngineDead."""
        if self._engine is not None:
            kill_engine(self._engine)

    async def stop(self) -> None:
        """Shut the engine down, also while it is being built; errors are logged.

        This takes at most `grace_s` + SHUTDOWN_S seconds, with peers some seconds more. Before a
        swap the keeper may keep the engine.
        """
        building, self._building = self._building, None
        engine, self._engine = building or self._engine, None
        await self.peers.end(died=False)
        if building is None and await self._keep(engine):
            engine = None
        if not self.keeper.stuck:  # also without an engine: an earlier shutdown may still run
            await self.keeper.shut_down(engine, self.grace_s, kill=building is not None)
        self._lifecycle.stopped()

    async def _keep(self, engine: Engine | None) -> bool:
        """Let the keeper keep the engine for a later drain; return whether it does."""
        if engine is None or engine.dead() or not self._lifecycle.swapping:
            return False
        return await self.keeper.keep(
            engine, self.engine_capacity, lambda: self._lifecycle.swapping
        )
