"""What the gateway's /metrics reads of a fleet, in states that its page rarely meets, and what it
tells of Redis by one snapshot after the other."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from kit.commands.support import run_producer
from kit.protocol.lessee import DATE, QUEUE, Lessee, submit_batch

from contract.redis.batches import BatchStore
from contract.redis.tenants import Tenant, Tenants
from gateway.metrics import routes
from gateway.metrics.routes import MAX_TENANTS, STALE_S, Snapshots
from gateway.metrics.series import RouteCounts
from gateway.redis.fleet import Fleet, FleetReads
from producer.collect.collect import Collector


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
    assert FleetReads.using(store).fleet(["warmq"]).overdue_s == 0


def test_a_lease_that_nobody_has_put_back_is_overdue(
    store: BatchStore, redis_client: redis.Redis
) -> None:
    submit_batch(store, 2)
    lessee = Lessee(redis_client)
    first, _ = lessee.pop(2)
    assert FleetReads.using(store).fleet(["warmq"]).overdue_s == 0
    lessee.expire_leases(first)  # to the first millisecond of 1970
    assert FleetReads.using(store).fleet(["warmq"]).overdue_s > 1e9


def fleet(store: BatchStore) -> Fleet:
    return FleetReads.using(store).fleet(["warmq"])


def read_to_the_end(store: BatchStore, batch_id: str) -> None:
    batch = store.batch(batch_id)
    assert batch is not None
    collector = Collector(store, batch, follow=False, partial=True)
    assert len(list(collector.lines("input"))) > 0
    collector.mark_collected()


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


def test_results_are_collected_where_redis_takes_no_write(
    store: BatchStore, redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    lessee = Lessee(redis_client)
    submit_batch(store, 2)
    lessee.done(*lessee.pop(2))
    redis_client.config_set("min-replicas-to-write", 1)
    try:
        told = run_producer("results", "b1", "-o", tmp_path / "out", redis_url=redis_url)
    finally:
        redis_client.config_set("min-replicas-to-write", 0)
    assert told.returncode == 0, told.stderr
    assert len((tmp_path / "out").read_bytes().splitlines()) == 2
    assert fleet(store).uncollected == 2


def test_results_that_could_not_be_kept_are_still_told_of(
    store: BatchStore, redis_client: redis.Redis
) -> None:
    lessee = Lessee(redis_client)
    submit_batch(store, 2)
    lessee.done(*lessee.pop(2))
    batch = store.batch("b1")
    assert batch is not None
    assert len(list(Collector(store, batch, follow=False).lines("input"))) == 2
    assert fleet(store).uncollected == 2


def test_a_batch_that_is_gone_is_not_noted_as_collected(
    store: BatchStore, redis_client: redis.Redis
) -> None:
    lessee = Lessee(redis_client)
    batch = submit_batch(store, 1).batch
    lessee.done(*lessee.pop(1))
    assert store.delete("b1")
    store.note_collected(batch)
    assert redis_client.keys("warmq:batch*") == []


def test_what_a_capped_tenant_has_waiting_is_told(
    store: BatchStore, redis_client: redis.Redis
) -> None:
    reads, tenants = FleetReads.using(store), Tenants.using(store)
    tenants.set_tenant(Tenant("capped", max_in_flight=1))
    submit_batch(store, 4, tenant="capped")
    assert len(Lessee(redis_client).pop(10)) == 1
    for found in (reads.waiting_by(QUEUE), reads.fleet([QUEUE]).waiting):
        assert [(one.tenant, one.requests) for one in found] == [("capped", 3)]
    assert tenants.in_flight_by(QUEUE) == {"capped": 1}


def test_a_look_counts_so_many_lists_of_a_tenant_and_says_if_there_are_more(
    store: BatchStore,
) -> None:
    for n in range(5):
        submit_batch(store, 2, batch_id=f"b{n}")
    reads = FleetReads.using(store)
    (some,) = reads.waiting_by(QUEUE, most=3)
    (every,) = reads.waiting_by(QUEUE, most=5)
    assert (some.requests, some.more) == (8, True)
    assert (every.requests, every.more) == (10, False)


@pytest.fixture
def snapshots(store: BatchStore) -> Snapshots:
    settings = SimpleNamespace(queue="warmq", high_water=0.6)
    services: Any = SimpleNamespace(batches=store, settings=settings)
    return Snapshots(services, RouteCounts([]))


def told(snapshots: Snapshots) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in snapshots.collect()
    }


async def test_a_snapshot_is_not_told_any_more_when_it_is_old(
    snapshots: Snapshots, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_batch(store, 3)
    await snapshots._take()
    assert told(snapshots)["warmq_redis_up"] == [({}, 1)]
    later = routes.time.monotonic() + STALE_S
    monkeypatch.setattr(routes, "time", SimpleNamespace(monotonic=lambda: later))
    found = told(snapshots)
    assert found["warmq_redis_up"] == [({}, 0)]
    assert "warmq_waiting" not in found


async def test_a_tenant_that_is_named_stays_named_and_later_ones_are_told_together(
    snapshots: Snapshots, store: BatchStore
) -> None:
    for n in range(MAX_TENANTS):
        submit_batch(store, 1, batch_id=f"b{n}", tenant=f"t{n}")
    await snapshots._take()
    submit_batch(store, 9, batch_id="late", tenant="late")
    await snapshots._take()
    waiting = {
        labels["tenant"]: count for labels, count in told(snapshots)["warmq_waiting"] if count
    }
    assert waiting == {f"t{n}": 1 for n in range(MAX_TENANTS)} | {"other": 9}
