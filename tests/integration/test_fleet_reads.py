"""What the gateway's /metrics reads of a fleet, in states that its page rarely meets."""

from __future__ import annotations

import redis
from lessee import DATE, Lessee, submit_batch

from contract.redis.batches import BatchStore
from contract.redis.fleet_now import FleetReads


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
