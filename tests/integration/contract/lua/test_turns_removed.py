"""Nobody waits while messages without a use are removed; a deleted batch leaves none."""

from __future__ import annotations

import pytest
import redis
from kit.protocol.lessee import QUEUE, Lessee, submit_batch
from kit.protocol.turn_steps import batches_of, end

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore

MANY = 5000


@pytest.fixture
def worker(redis_client: redis.Redis) -> Lessee:
    """Return one worker's side of the protocol."""
    return Lessee(redis_client)


def waiting(client: redis.Redis) -> int:
    """Return how many requests the queue's counter says wait."""
    return int(client.hget(naming.turns_key(QUEUE), "waiting") or 0)


def test_a_batch_deleted_without_a_worker_leaves_nothing(
    store: BatchStore, redis_client: redis.Redis
) -> None:
    submitted = submit_batch(store, MANY, batch_id="b", tenant="a")
    submit_batch(store, 10, batch_id="kept", tenant="a")
    store.delete("b", force=True)
    assert not redis_client.exists(submitted.list_key)
    assert waiting(redis_client) == 10
    store.delete("kept", force=True)
    assert not redis_client.exists(naming.turns_key(QUEUE, 6))
    assert waiting(redis_client) == 0


@pytest.mark.parametrize("way", ["cancelled", "expired", "gone", "deleted"])
@pytest.mark.parametrize("priority", [6, 9])
def test_nobody_waits_until_messages_without_a_use_are_removed(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis, way: str, priority: int
) -> None:
    submitted = submit_batch(store, MANY, batch_id="dead", tenant="a")
    end(worker, worker.pop(1), "failed", keep=True)
    submit_batch(store, 64, batch_id="good", tenant="b", priority=priority)
    if way == "cancelled":
        store.cancel(submitted.batch)
    elif way == "expired":
        store.expire(submitted.batch)
    elif way == "deleted":
        store.delete("dead", force=True)
    else:
        redis_client.delete("warmq:batch:dead")
    assert batches_of(worker.pop(32)).count("good") == 32
    for _ in range(MANY):
        worker.pop(32)
        if not worker.head[3]:
            break
    assert not redis_client.exists(submitted.list_key)
    assert waiting(redis_client) == 0


def test_nobody_waits_until_texts_that_are_no_messages_are_removed(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis
) -> None:
    plain = naming.priority_list(QUEUE, 6)
    redis_client.lpush(plain, *[b"{}"] * MANY)
    submit_batch(store, 64, batch_id="good", tenant="z")
    assert batches_of(worker.pop(32)) == ["good"] * 32
    while worker.head[3]:
        worker.pop(100)
    assert not redis_client.exists(plain)
    assert waiting(redis_client) == 0
    assert redis_client.hlen(keys.DEAD) == MANY
