"""The drain when it is told to stop, or Redis goes away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis
from kit.drain.draining import LONG, draining, leased, send, soon
from kit.protocol.lessee import (
    chat,
    now,
    queued_ids,
    submit_batch,
)

from contract.errors import WarmqError
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer
from worker.drain.lifecycle import State
from worker.engine import Capacity
from worker.engine.simulated.engine import SimulatedEngine

# -- stopping --------------------------------------------------------------------------------


async def test_a_graceful_stop_hands_the_look_ahead_back_at_once_and_finishes_the_rest(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(
        store, bodies=[chat(f"{n}", user="simulate:sleep=1") for n in range(20)]
    )
    async with draining(redis_url, look_ahead=4) as running:
        await soon(lambda: running.engines and running.engine.running == 4)
        await soon(lambda: len(running.drain.in_flight) == 8)
        running.drain.stop()
        await soon(lambda: redis_client.llen(submitted.list_key) == 16, 0.8)
        assert now(store).terminal == 0
        await running.ended()
    assert now(store).number("completed") == 4
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids[4:]
    assert leased(redis_client) == 0
    assert redis_client.hlen(keys.DEATHS) == 0
    assert not redis_client.hlen(keys.WORKERS)
    assert running.state is State.STOPPED


async def test_hurry_hands_back_everything_without_a_death(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(f"{n}", user=LONG) for n in range(20)])
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 4)
        running.drain.stop()
        await soon(lambda: len(running.drain.in_flight) == 4)
        running.drain.hurry()
        await running.ended(2)
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids
    assert leased(redis_client) == 0
    assert redis_client.hlen(keys.DEATHS) == 0


async def test_the_drain_timeout_bounds_a_graceful_stop(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(user=LONG)] * 2)
    async with draining(redis_url, drain_timeout_s=0.3) as running:
        await soon(lambda: running.engines and running.engine.running == 2)
        running.drain.stop()
        await running.ended(3)
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids


async def test_an_engine_that_dies_while_draining_blames_nobody(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(user=LONG)] * 2)
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 2)
        running.drain.stop()
        await soon(lambda: running.state is State.DRAINING)
        running.engine.kill()
        await running.ended()
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids
    assert redis_client.hlen(keys.DEATHS) == 0


class SlowStart(SimulatedEngine):
    """Takes for ever to start."""

    async def start(self) -> Capacity:
        await asyncio.sleep(600)
        return await super().start()


async def test_stop_while_the_engine_starts_ends_at_once(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 3)
    async with draining(redis_url, SlowStart) as running:
        await soon(lambda: running.engines)
        running.drain.stop()
        await running.ended(2)
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids


# -- Redis goes away -------------------------------------------------------------------------


@pytest.fixture
def own_redis(tmp_path: Path):
    """Return a private Redis that the test may stop."""
    with RedisServer(tmp_path, "--appendonly", "no") as server:
        yield server


async def test_a_stop_without_redis_ends_within_bounds(own_redis: RedisServer) -> None:
    with own_redis.client() as client:
        send(client, *[chat(f"{n}", user=LONG) for n in range(10)])
    with pytest.raises(BaseExceptionGroup) as caught:
        async with draining(own_redis.url, drain_timeout_s=0.2) as running:
            await soon(lambda: running.engines and running.engine.running == 4)
            own_redis.stop()
            running.drain.stop()
            await running.ended(30)
    assert "Redis is unreachable" in str(caught.value.subgroup(WarmqError).exceptions)  # type: ignore[union-attr]
    assert running.state is State.STOPPED


async def test_a_second_signal_without_redis_gets_out_soon(own_redis: RedisServer) -> None:
    with own_redis.client() as client:
        send(client, *[chat(f"{n}", user=LONG) for n in range(10)])
    with pytest.raises(BaseExceptionGroup):
        async with draining(own_redis.url, drain_timeout_s=60) as running:
            await soon(lambda: running.engines and running.engine.running == 4)
            own_redis.stop()
            running.drain.stop()
            running.drain.hurry()
            await running.ended(9)


async def test_a_side_task_that_dies_ends_the_drain_and_hands_back(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(f"{n}", user=LONG) for n in range(10)])
    with pytest.raises(BaseExceptionGroup) as caught:
        async with draining(redis_url, drain_timeout_s=0.1) as running:
            await soon(lambda: running.engines and running.engine.running == 4)

            def broken(group: object) -> None:
                raise ZeroDivisionError("the committer is broken")

            running.drain._committer._committed = broken
            await asyncio.to_thread(store.cancel_request, submitted.batch, "c1")
            await running.ended(30)
    assert caught.value.subgroup(ZeroDivisionError)
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids[1:]
