"""What the gateway's /metrics reads of a fleet, in states that its page rarely meets."""

from __future__ import annotations

import math

import redis
from lessee import DATE, Lessee, submit_batch

from contract.redis.batches import BatchStore
from contract.redis.fleet_now import Fleet, FleetReads
from producer.core.collect import Collector


def test_leases_on_their_way_back_are_not_overdue(
    store: BatchStore, redis_client: redis.Redis
) -> None:
    submit_batch(store, 501)
    lessee = Lessee(redis_client)
    leases = lessee.pop(501, slots=501)
    assert len(leases) == 501
    pairs = [word for lease in reversed(leases) for word in (lease.id, 0)]
    count, left = lessee.run("release", lessee.worker, 2, lessee.ttl_ms, DATE, *pairs)
    assert (count, left) == (501, 1), "one script moves 500 at most"
    assert FleetReads.beside(store).fleet(["warmq"]).overdue_s == 0


def test_a_lease_that_nobody_has_put_back_is_overdue(
    store: BatchStore, redis_client: redis.Redis
) -> None:
    submit_batch(store, 2)
    lessee = Lessee(redis_client)
    first, _ = lessee.pop(2)
    assert FleetReads.beside(store).fleet(["warmq"]).overdue_s == 0
    lessee.expire_leases(first)  # to the first millisecond of 1970
    assert FleetReads.beside(store).fleet(["warmq"]).overdue_s > 1e9


def fleet(store: BatchStore) -> Fleet:
    return FleetReads.beside(store).fleet(["warmq"])


def read_to_the_end(store: BatchStore, batch_id: str) -> None:
    batch = store.batch(batch_id)
    assert batch is not None
    assert len(list(Collector(store, batch, follow=False, partial=True).lines("input"))) > 0


def test_results_are_uncollected_until_somebody_has_read_all_of_them(
    store: BatchStore, redis_client: redis.Redis
) -> None:
    lessee = Lessee(redis_client)
    submitted = submit_batch(store, 3)
    first, *others = lessee.pop(3)
    lessee.done(first)
    assert (fleet(store).uncollected, fleet(store).expire_s) == (0, math.inf)
    read_to_the_end(store, "b1")  # what there is of an unfinished batch
    for lease in others:
        lessee.done(lease)
    assert (fleet(store).uncollected, fleet(store).expire_s) == (3, math.inf)
    lessee.run("retire", "b1", submitted.batch.life, 60_000, 1, *submitted.ids)
    assert 0 < fleet(store).expire_s <= 60
    read_to_the_end(store, "b1")
    assert (fleet(store).uncollected, fleet(store).expire_s) == (0, math.inf)


def test_a_batch_that_is_run_again_after_it_was_collected_is_uncollected_again(
    store: BatchStore, redis_client: redis.Redis
) -> None:
    lessee = Lessee(redis_client)
    batch = submit_batch(store, 2).batch
    first, second = lessee.pop(2)
    lessee.done(first)
    lessee.done(second, outcome="failed", keep=True)
    read_to_the_end(store, "b1")
    assert fleet(store).uncollected == 0
    assert store.retry(batch, ["failed"]) == 1
    (again,) = lessee.pop(1)
    lessee.done(again)
    assert fleet(store).uncollected == 2


def test_a_batch_that_is_gone_is_not_noted_as_collected(
    store: BatchStore, redis_client: redis.Redis
) -> None:
    lessee = Lessee(redis_client)
    batch = submit_batch(store, 1).batch
    lessee.done(*lessee.pop(1))
    assert store.delete("b1")
    store.collected(batch)
    assert redis_client.keys("warmq:batch*") == []
