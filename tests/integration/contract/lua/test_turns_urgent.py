"""Urgent lists come first within their tenant's turn, and marks tell which lists have deadlines."""

from __future__ import annotations

from collections import Counter

import redis
from kit.protocol.lessee import QUEUE, Lease, Lessee, submit_batch

from contract import naming
from contract.message import read_delivery
from contract.redis.batches import BatchStore

FAR = "+3600000"


def batches_of(leases: list[Lease]) -> list[str]:
    return [read_delivery(lease.id, lease.message).batch for lease in leases]


def list_of(batch_id: str, tenant: str = naming.DEFAULT_TENANT) -> str:
    return naming.turn_list(QUEUE, 6, tenant, batch_id)


def marked(client: redis.Redis) -> set[str]:
    return {raw.decode().rpartition("\x06")[2] for raw in client.zrange(
        naming.deadlines_key(QUEUE), 0, -1)}  # fmt: skip


def test_an_urgent_list_is_taken_before_the_others_of_its_tenant(
    store: BatchStore, worker: Lessee
) -> None:
    for name in ("a", "b", "c"):
        submit_batch(store, 100, batch_id=name)
    urgent = [list_of("c"), list_of("b")]
    taken = batches_of(worker.pop(150, urgent=urgent))
    assert taken == ["c"] * 100 + ["b"] * 50
    worker.turn = ["", 0]  # another worker
    assert set(batches_of(worker.pop(32))) == {"a"}  # it was served least


def test_a_turn_of_another_list_does_not_go_on(store: BatchStore, worker: Lessee) -> None:
    submit_batch(store, 100, batch_id="a")
    assert len(worker.pop(8)) == 8
    submit_batch(store, 100, batch_id="b")
    assert int(worker.turn[1]) > 0
    assert batches_of(worker.pop(8, urgent=[list_of("b")])) == ["b"] * 8
    assert batches_of(worker.pop(8, urgent=[list_of("b")])) == ["b"] * 8


def test_an_urgent_list_takes_nothing_from_other_tenants(store: BatchStore, worker: Lessee) -> None:
    for name, tenant in (("due", "t"), ("rest", "t"), ("x", "u"), ("y", "v")):
        submit_batch(store, 400, batch_id=name, tenant=tenant)
    counts = Counter[str]()
    for _ in range(12):
        counts.update(batches_of(worker.pop(32, urgent=[list_of("due", "t")])))
    assert counts == {"due": 128, "x": 128, "y": 128}


def test_a_list_that_is_empty_or_unknown_leaves_the_turns_as_they_are(
    store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 8, batch_id="a")
    submit_batch(store, 100, batch_id="b")
    urgent = [list_of("gone"), list_of("a"), naming.turn_list(QUEUE, 3, "nobody", "c")]
    taken = batches_of(worker.pop(40, urgent=urgent))
    assert taken == ["a"] * 8 + ["b"] * 32


def test_a_higher_priority_is_before_an_urgent_list(store: BatchStore, worker: Lessee) -> None:
    submit_batch(store, 10, batch_id="due")
    submit_batch(store, 10, batch_id="high", priority=3)
    taken = batches_of(worker.pop(20, urgent=[list_of("due")]))
    assert taken == ["high"] * 10 + ["due"] * 10


def test_a_list_with_a_deadline_is_marked_while_it_has_messages(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 3, batch_id="none")
    submit_batch(store, 3, batch_id="fifo", fifo=True, deadline=FAR)
    batch = submit_batch(store, 3, batch_id="due", deadline=FAR).batch
    assert marked(redis_client) == {"due"}
    score = redis_client.zscore(naming.deadlines_key(QUEUE), list_of("due"))
    assert score == batch.number("deadline")
    leases = worker.pop(3, urgent=[list_of("due")])
    assert batches_of(leases) == ["due"] * 3
    worker.pop()
    assert marked(redis_client) == set()
    worker.release(*leases)
    assert marked(redis_client) == {"due"}
    store.delete("due", force=True)
    assert marked(redis_client) == set()
