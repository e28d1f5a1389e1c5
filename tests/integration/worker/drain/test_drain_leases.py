"""The drain when leases or replies are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import redis
from kit.drain.draining import LONG, draining, leased, soon
from kit.protocol.lessee import (
    QUEUE,
    Lessee,
    celery_message,
    chat,
    now,
    queued_ids,
    stored,
    submit_batch,
)

from contract.redis import keys
from contract.redis.batches import BatchStore
from worker.drain.endings import Ending
from worker.drain.leases import Leases
from worker.engine import Completion, EngineRequest
from worker.engine.simulated.engine import SimulatedEngine
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
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    log, body = tmp_path / "log", chat(user="simulate:sleep=0.3")
    redis_client.lpush(QUEUE, celery_message("same", body), celery_message("same", body))
    async with draining(redis_url, partial(SimulatedEngine, log=log)) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        await soon(lambda: stored(redis_client, "same"))
        await soon(lambda: leased(redis_client) == 0)
    began_and_ended = [line.split()[:2] for line in log.read_text().splitlines()]
    assert began_and_ended == [["start", "same"], ["end", "same"]]
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


@pytest.fixture
async def pair(redis_url: str) -> AsyncIterator[Leases]:
    leases = Leases(WorkerSettings(redis_url=redis_url, engine="simulated"), "w1")
    yield leases
    await leases.close()


async def lose_a_pop(leases: Leases, k: int) -> None:
    """Let Redis hand out leases of which this worker never hears."""
    known = leases._highest
    await leases.pop(k, 4)
    leases._highest = known


async def test_a_busy_worker_hands_a_lost_pop_back_with_its_next_renewal(
    redis_client: redis.Redis, store: BatchStore, pair: Leases
) -> None:
    submitted = submit_batch(store, 30)
    held = [d.lease for d in (await pair.pop(10, 4)).deliveries]
    await lose_a_pop(pair, 10)
    held += [d.lease for d in (await pair.pop(5, 4)).deliveries]
    # A POP is under way whenever this worker renews
    popped, lost = await asyncio.gather(pair.pop(5, 4), pair.renew(held))
    held += [d.lease for d in popped.deliveries]
    assert lost == []
    assert leased(redis_client) == len(held) == 20
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids[10:20]
    assert redis_client.hlen(keys.DEATHS) == 0


async def test_a_pop_without_a_message_is_enough_to_tell_that_an_earlier_one_is_lost(
    redis_client: redis.Redis, store: BatchStore, pair: Leases
) -> None:
    submit_batch(store, 10)
    await lose_a_pop(pair, 10)
    await pair.pop(5, 4)
    await asyncio.gather(pair.pop(5, 4), pair.renew([]))
    assert leased(redis_client) <= 5


async def test_renew_takes_no_lease_for_lost_while_its_pop_buries_another(
    redis_client: redis.Redis, pair: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply is here, its deliveries are not known to the drain yet."""
    good = celery_message("good")
    redis_client.lpush(QUEUE, good, good.replace(b"[[", b"[[\xff").replace(b"good", b"evil"))
    bury = pair._bury

    async def renew_first(lease: str, reason: str) -> None:
        assert await pair.renew([]) == []
        await bury(lease, reason)

    monkeypatch.setattr(pair, "_bury", renew_first)
    (delivery,) = (await pair.pop(5, 4)).deliveries
    assert await pair.renew([delivery.lease]) == []
    assert redis_client.llen(QUEUE) == 0


async def test_the_lease_of_an_exchanged_delivery_is_not_taken_for_lost(
    redis_client: redis.Redis, redis_url: str
) -> None:
    redis_client.lpush(QUEUE, celery_message("same", chat(user=LONG)))
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        done, open_again = running.leases.done, asyncio.Event()

        async def slow(endings: Sequence[Ending]) -> int:
            await open_again.wait()
            return await done(endings)

        running.leases.done = slow  # type: ignore[method-assign]
        redis_client.lpush(QUEUE, celery_message("same", chat(user=LONG)))
        await soon(lambda: running.drain.counts.popped == 2)
        # Given two leases of one request, of which one is to be dropped
        assert leased(redis_client) == 2
        assert await running.leases.renew(running.drain.in_flight.leases()) == []
        assert redis_client.llen(QUEUE) == 0
        open_again.set()
        await soon(lambda: leased(redis_client) == 1)


def test_a_living_workers_lost_pop_counts_no_death_when_it_is_swept(
    redis_client: redis.Redis,
) -> None:
    worker, other = Lessee(redis_client, "w1"), Lessee(redis_client, "w2")
    redis_client.lpush(QUEUE, celery_message("lost"), celery_message("held"))
    (lost,) = worker.pop(1)
    (held,) = worker.pop(1)
    worker.renew(held.id)
    other.expire_leases(lost)
    assert other.sweep() == 1
    assert redis_client.hlen(keys.DEATHS) == 0
    # While a dead one's leases do, though the last were popped after its last renewal
    redis_client.zadd(keys.LEASES, {held.id: 1})
    other.allow_sweep()
    assert other.sweep() == 1
    assert redis_client.hlen(keys.DEATHS) == 1


async def test_the_suspects_lock_is_never_prolonged_or_dropped_for_its_next_owner(
    redis_client: redis.Redis, redis_url: str
) -> None:
    lock = keys.suspects_list(QUEUE) + ":lock"
    first, second = (
        Leases(WorkerSettings(redis_url=redis_url, engine="simulated"), name)
        for name in ("w1", "w2")
    )
    try:
        assert await first.take_suspects_lock()
        assert not await second.take_suspects_lock()
        redis_client.delete(lock)  # it expired
        assert await second.take_suspects_lock()
        assert not await first.take_suspects_lock()
        await first.drop_suspects_lock()
        assert redis_client.get(lock) == b"w2"
        await second.drop_suspects_lock()
        assert not redis_client.exists(lock)
    finally:
        await first.close()
        await second.close()


async def test_a_sweep_that_comes_after_the_goodbye_announces_nobody(
    pair: Leases, redis_client: redis.Redis
) -> None:
    await pair.sweep(b"{}")
    assert redis_client.hlen(keys.WORKERS) == 1
    await pair.leave()
    await pair.sweep(b"{}")
    assert redis_client.hlen(keys.WORKERS) == 0
