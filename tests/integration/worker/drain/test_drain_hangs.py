"""The drain when its engine makes no step, or only seems to make none."""

from __future__ import annotations

import asyncio
import datetime as dt
import time

import redis
from kit.drain.draining import LONG, draining, send, soon
from kit.protocol.lessee import QUEUE, celery_message, chat, now, stored, submit_batch

from contract.errors import EngineDead
from contract.redis.batches import BatchStore
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.simulated.engine import SimulatedEngine


class HangingEngine(SimulatedEngine):
    """Makes no step, once."""

    async def start(self) -> Capacity:
        capacity = await super().start()
        self._killed = asyncio.Event()
        self.mute = type(self).hang
        type(self).hang = False
        return capacity

    hang = True

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if self.mute:
            await self._killed.wait()
            raise EngineDead("killed")
        return await super().generate(request, request_id)

    def _die(self) -> None:
        super()._die()
        self._killed.set()

    def last_progress(self) -> float:
        return 0.0


async def test_an_engine_that_hangs_is_killed_and_its_requests_run_again(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    HangingEngine.hang = True
    submitted = submit_batch(store, 3)
    async with draining(redis_url, HangingEngine, stall_timeout_s=0.3) as running:
        await soon(lambda: now(store).finished)
        assert running.supervisor.deaths == 1
    meta = stored(redis_client, submitted.ids[0])
    assert meta is not None
    assert meta["warmq"]["timing"]["attempts"] == 2


class SilentEngine(SimulatedEngine):
    """Makes no step, and when it is killed tells nobody; the second one works."""

    built = 0

    def build(self) -> None:
        SilentEngine.built += 1
        self.silent = SilentEngine.built == 1

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if self.silent:
            await asyncio.Event().wait()
        return await super().generate(request, request_id)

    def last_progress(self) -> float:
        return 0.0 if self.silent else super().last_progress()


async def test_requests_that_a_dead_engine_never_gives_back_are_taken_from_it(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    SilentEngine.built = 0
    submit_batch(store, 3)
    async with draining(redis_url, SilentEngine, stall_timeout_s=0.2) as running:
        await soon(lambda: now(store).finished)
        assert running.supervisor.deaths == 1
    assert now(store).number("completed") == 3


async def test_a_hung_engine_is_killed_although_its_requests_expire_before_that(
    redis_client: redis.Redis, redis_url: str
) -> None:
    SilentEngine.built = 0
    async with draining(redis_url, SilentEngine, stall_timeout_s=1.0) as running:
        await soon(lambda: SilentEngine.built == 1)
        for n in range(40):
            expires = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=0.4)
            message = celery_message(f"t{n}", chat(), expires=expires.isoformat())
            redis_client.lpush(QUEUE, message)
            await soon(lambda n=n: stored(redis_client, f"t{n}"))
            if SilentEngine.built == 2:
                break
        assert running.supervisor.deaths == 1


async def test_a_worker_that_stood_still_itself_does_not_take_its_engine_for_hung(
    redis_client: redis.Redis, redis_url: str
) -> None:
    def make(slots: int, latency_s: float) -> SimulatedEngine:
        return SimulatedEngine(slots, latency_s, process=True)

    async with draining(redis_url, make, stall_timeout_s=1.0) as running:
        send(redis_client, chat(user=LONG))
        await soon(lambda: running.engines and running.engine.running == 1)
        for _ in range(3):
            stepped_at = running.engine.last_progress()
            time.sleep(2.0)  # noqa: ASYNC251 - the loop, and with it the worker, stands still
            await soon(lambda at=stepped_at: running.engine.last_progress() > at)
        assert running.supervisor.deaths == 0
        assert not running.engine.dead()
        assert running.engine.running == 1
