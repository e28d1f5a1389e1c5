"""DELETE against its holes."""

from __future__ import annotations

import orjson
import pytest
import redis
from kit.protocol.lessee import (
    Lessee,
    Submitted,
    celery_message,
    client_of,
    counts,
    now,
    stored,
    submit_batch,
)

from contract import naming
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


# -- a list that several batches use ---------------------------------------------------------

RUN = "run_0123456789abcdef"


def window(store: BatchStore, number: int, count: int) -> Submitted:
    return submit_batch(store, count, batch_id=f"{RUN}.{number}", run=RUN)


def waiting(client: redis.Redis, submitted: Submitted) -> tuple[int, int]:
    """Return the length of a batch's list, and how many messages its queue counts."""
    counted = client.hget(naming.turns_key("warmq"), "waiting")
    return int(client.llen(submitted.list_key)), int(counted or 0)


def delete(store: BatchStore, submitted: Submitted) -> None:
    store.cancel(submitted.batch)
    assert store.delete(submitted.id)


def test_the_last_deleted_window_of_a_run_leaves_no_messages(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    first, second = window(store, 0, 1200), window(store, 1, 3)
    delete(store, first)
    assert waiting(redis_client, second) == (3, 3)
    delete(store, second)
    assert waiting(redis_client, second) == (0, 0)
    assert store.turns("warmq") == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_deleted_window_takes_nothing_of_the_other(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee, number: int
) -> None:
    windows = [window(store, 0, 2), window(store, 1, 4)]
    assert store.delete(windows[number].id, force=True)
    living = windows[1 - number]
    assert waiting(redis_client, living) == (len(living.ids),) * 2
    assert [lease.request_id for lease in worker.pop()] == living.ids


def test_messages_of_a_deleted_window_between_those_of_another_go_with_it(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    first, second = window(store, 0, 2), window(store, 1, 2)
    # Given a retried message of the first window behind those of the second, and one more after it
    (lease,) = worker.pop(1)
    worker.done(lease, outcome="failed", keep=True)
    assert store.retry(first.batch, ["failed"]) == 1
    later = window(store, 2, 1)
    delete(store, first)
    assert waiting(redis_client, second) == (4, 4)
    delete(store, second)
    delete(store, later)
    assert waiting(redis_client, first) == (0, 0)


def test_deleted_batches_of_one_list_in_order_of_arrival_leave_no_messages(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    old, new = (submit_batch(store, 3, batch_id=name, fifo=True) for name in ("old", "new"))
    delete(store, new)
    assert waiting(redis_client, old) == (3, 3)
    delete(store, old)
    assert waiting(redis_client, old) == (0, 0)


def test_a_request_without_a_batch_stays_in_its_tenants_list(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    old = submit_batch(store, 3, batch_id="old", fifo=True)
    redis_client.lpush(old.list_key, celery_message("plain"))
    redis_client.hincrby(naming.turns_key("warmq"), "waiting", 1)
    delete(store, old)
    assert waiting(redis_client, old) == (1, 1)
    assert [lease.request_id for lease in worker.pop()] == ["plain"]
