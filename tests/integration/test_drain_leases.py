"""The drain when leases or replies are lost."""

from __future__ import annotations

import asyncio

import pytest
import redis
from draining import LONG, draining, leased, soon
from lessee import (
    QUEUE,
    Lessee,
    celery_message,
    chat,
    now,
    queued_ids,
    stored,
    submit_batch,
)

from contract import keys
from contract.store import BatchStore
from worker.engine import Completion, EngineRequest
from worker.engine.simulated import SimulatedEngine
from worker.leases import Leases
from worker.settings import WorkerSettings


async def test_work_whose_lease_is_lost_is_aborted_and_commits_nothing(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(user=LONG)])
    other = Lessee(redis_client, "other")
    async with draining(redis_url, lease_s=2) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        # Given another worker swept the lease and has the request now
        (lease,) = running.drain.in_flight.leases()
        redis_client.zadd(keys.LEASES, {lease: 1})
        other.allow_sweep()
        assert other.sweep(lease_ms=2000) == 1
        (fresh,) = other.pop()
        # When this worker renews
        await soon(lambda: running.engine.running == 0)
        # Then it has no ending for the request
        assert not running.drain.in_flight
        assert stored(redis_client, submitted.ids[0]) is None
        other.done(fresh)
    assert now(store).number("completed") == 1


@pytest.mark.parametrize("fate", ["simulate:sleep=1.2", "simulate:fail-later"])
async def test_a_request_that_comes_back_to_the_worker_that_still_runs_it_is_not_lost(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, fate: str
) -> None:
    """Its old lease was swept; the new one must answer for it, whichever way it ends."""
    submitted = submit_batch(store, bodies=[chat(user=fate)])
    other = Lessee(redis_client, "other")
    async with draining(redis_url, LateFailure, lease_s=2) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        (lease,) = running.drain.in_flight.leases()
        redis_client.zadd(keys.LEASES, {lease: 1})
        other.allow_sweep()
        assert other.sweep(lease_ms=2000) == 1
        await soon(lambda: running.drain.counts.popped == 2)
        await soon(lambda: now(store).finished)
        await soon(lambda: not running.drain.in_flight)
        assert leased(redis_client) == 0
    assert stored(redis_client, submitted.ids[0])
    assert now(store).terminal == 1


class LateFailure(SimulatedEngine):
    """Fails a request after it ran for a while."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if request.body.get("user") == "simulate:fail-later":
            body = request.body | {"user": "simulate:sleep=1.2"}
            await super().generate(EngineRequest(request.url, body), request_id)
            raise ZeroDivisionError("late")
        return await super().generate(request, request_id)


async def test_one_task_id_twice_at_once_runs_once_and_leaves_no_lease(
    redis_client: redis.Redis, redis_url: str
) -> None:
    body = chat(user="simulate:sleep=0.3")
    redis_client.lpush(QUEUE, celery_message("same", body), celery_message("same", body))
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        await soon(lambda: stored(redis_client, "same"))
        await soon(lambda: leased(redis_client) == 0)
        assert running.engine.steps == 2  # one began, one ended
    assert redis_client.llen(QUEUE) == 0


async def test_a_pop_whose_reply_is_lost_is_handed_back_by_renew_in_its_old_order(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 20)
    leases = Leases(WorkerSettings(redis_url=redis_url, engine="simulated"), "w1")
    try:
        await leases.pop(20, 4)
        assert await leases.renew([]) == []
        assert queued_ids(redis_client, submitted.list_key) == submitted.ids
        assert leased(redis_client) == 0
    finally:
        await leases.close()


async def test_renew_hands_nothing_back_while_a_pop_is_under_way(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, 500)
    leases = Leases(WorkerSettings(redis_url=redis_url, engine="simulated"), "w1")
    held: list[str] = []
    try:
        for _ in range(20):
            popped, lost = await asyncio.gather(leases.pop(20, 4), leases.renew(held))
            assert lost == []
            held += [delivery.lease for delivery in popped.deliveries]
        assert len(held) == leased(redis_client) == 400
    finally:
        await leases.close()
