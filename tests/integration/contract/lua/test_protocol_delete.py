"""DELETE against its holes."""

from __future__ import annotations

import orjson
import redis
from kit.protocol.lessee import (
    Lessee,
    Submitted,
    client_of,
    counts,
    now,
    stored,
    submit_batch,
)

from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import eventually


def test_delete_of_a_running_batch_is_refused(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 2)
    worker.done(*worker.pop(1))
    assert store.delete("b1") is False
    assert now(store).status == "in_progress"


def test_delete_of_a_finished_batch_leaves_nothing(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 3)
    worker.done(*worker.pop())
    assert store.delete("b1") is True
    assert store.delete("b1") is True
    left = {key.decode() for key in redis_client.keys("*") if redis_client.pttl(key) < 0}
    assert left == {keys.LEASE_SEQ}


def submit_later(store: BatchStore, old: Submitted, count: int) -> Submitted:
    """Submit again under the same id; batches are told apart by the ms of their creation."""

    def later() -> bool:
        seconds, micros = client_of(store).time()
        return seconds * 1000 + micros // 1000 > int(old.batch.created)

    eventually(later, 5, "the next millisecond", every_s=0.001)
    return submit_batch(store, count)


def test_stragglers_of_a_deleted_batch_do_not_touch_its_successor(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    # Given one request running, one queued, and the batch cancelled and deleted meanwhile
    old = submit_batch(store, 2)
    (running,) = worker.pop(1)
    store.cancel(old.batch)
    assert store.delete("b1")
    new = submit_later(store, old, 2)
    # When the old ones end or are met
    assert worker.done(running) == 0
    assert worker.done(running, outcome="failed", keep=True) == 0
    leases = worker.pop()
    # Then only the new batch's own requests count
    assert [lease.request_id for lease in leases] == new.ids
    assert counts(now(store)) == {}
    worker.done(*leases)
    assert (now(store).status, counts(now(store))) == ("completed", {"completed": 2})


def test_a_straggler_that_is_swept_does_not_touch_the_successor(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    old = submit_batch(store, 1)
    (running,) = worker.pop()
    store.cancel(old.batch)
    assert store.delete("b1")
    new = submit_later(store, old, 1)
    worker.expire_leases(running)
    assert worker.sweep() == 1
    (lease,) = worker.pop()
    assert orjson.loads(lease.message)["headers"]["warmq"]["created"] == new.batch.created
    worker.done(lease)
    assert counts(now(store)) == {"completed": 1}


def test_an_interrupted_delete_does_not_swallow_the_next_batch_of_that_id(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 3)
    worker.done(*worker.pop())
    # Given a delete that was killed after its first step
    assert worker.run("delete", "b1", now(store).life, 0) == 1
    # When the same id is submitted again
    new = submit_batch(store, 3)
    leases = worker.pop()
    # Then nothing of the old batch is in its way
    assert [lease.request_id for lease in leases] == new.ids
    assert len(list(store.index("b1"))) == 1
    worker.done(*leases)
    assert (now(store).status, counts(now(store))) == ("completed", {"completed": 3})


def test_a_slow_delete_stops_at_a_batch_that_is_submitted_meanwhile(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 2)
    worker.done(*worker.pop())
    chunk = redis_client.lindex(keys.batch_key("b1", "index"), 0)
    assert store.delete("b1")
    new = submit_batch(store, 2)
    worker.done(*worker.pop())
    assert worker.run("delete_chunk", "b1", chunk, *new.ids) == 0
    assert all(stored(redis_client, rid) for rid in new.ids)


def test_delete_names_the_batch_it_means(store: BatchStore, worker: Lessee) -> None:
    submit_batch(store, 1)
    worker.done(*worker.pop())
    assert worker.run("delete", "b1", "") == 0
    assert worker.run("delete", "b1", "1") == 0
    assert now(store).status == "completed"
