"""Orders of steps that the model of the protocol found (tests/faults/test_protocol_model.py)."""

from __future__ import annotations

import pytest
import redis
from kit.protocol.lessee import (
    QUEUE,
    SEED,
    Lessee,
    celery_message,
    counts,
    now,
    stored,
    submit_batch,
)
from kit.protocol.model_world import SCRIPTS
from kit.protocol.wire import AtOnce, Cut, Fate, Wire, load
from kit.verdicts.owners import ownerless

from contract import naming
from contract.errors import RequestFailed
from contract.index import IndexChunk
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.results import failure_meta
from worker.drain.sweeper import retire_some

TTL_MS = 60_000
LIMITS = {"high_water": 0.6, "high_water_requests": 1_000}


@pytest.fixture
def wire(redis_client: redis.Redis) -> Wire:
    """Return a network that can make a command arrive late."""
    return Wire(redis_client, load(redis_client, *SCRIPTS))


def retire(wire: Wire) -> None:
    """Let a worker retire what has finished, as far as the network lets it."""
    with pytest.raises((StopIteration, Cut)):
        retire_some(AtOnce(wire, TTL_MS)).send(None)


def test_what_was_cancelled_while_it_ran_and_then_found_unreadable_can_be_retried(
    store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 1)
    (lease,) = worker.pop()
    store.cancel(now(store))
    worker.bury(lease, "cannot be read")
    store.retry_dead([letter["id"] for letter in store.dead_letters()])
    store.retry(now(store), ["failed", "cancelled"])
    for again in worker.pop():
        worker.done(again)
    assert now(store).finished


def test_a_create_that_comes_again_after_a_delete_gives_the_batch_another_life(
    store: BatchStore, worker: Lessee
) -> None:
    command = ("create", "b1", "random", SEED, "", "queue", QUEUE)
    worker.run(*command)
    first = now(store).life
    store.delete("b1", force=True)
    worker.run(*command)
    assert now(store).life != first


def test_retrying_a_plain_dead_letter_takes_no_result_from_a_batch_with_that_id(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    rid = naming.request_id("b1", "c1")
    redis_client.lpush(QUEUE, celery_message(rid))
    (lease,) = worker.pop()
    _, batch = store.create("b1", SEED, {"queue": QUEUE})
    chunk = IndexChunk(1, f"{1:040x}", [(1, "c1", False)])
    meta = failure_meta(
        rid, RequestFailed("no JSON", code="invalid_json"), batch="b1", custom_id="c1", line=1
    )
    store.enqueue(batch, QUEUE, (0, SEED), chunk, [], [(rid, meta)], **LIMITS)
    worker.bury(lease, "cannot be read")
    store.retry_dead([letter["id"] for letter in store.dead_letters()])
    assert stored(redis_client, rid) is not None
    assert counts(now(store)) == {"failed": 1}


def test_a_retry_in_an_unfinished_batch_leaves_a_plain_result_of_the_same_id_its_end(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    redis_client.lpush(QUEUE, celery_message(naming.request_id("b1", "c2")))
    worker.done(*worker.pop())
    submit_batch(store, 2)
    worker.done(*worker.pop(1), outcome="failed", keep=True)
    assert store.retry(now(store), ["failed"]) == 1
    worker.done(*worker.pop())
    assert now(store).finished


def test_a_retry_that_comes_again_after_the_batch_was_retired_lets_nothing_expire(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee, wire: Wire
) -> None:
    submitted = submit_batch(store, 1)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    command = ("retry", "b1", now(store).life, submitted.ids[0], "failed")
    worker.run(*command)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    retire(wire)
    assert redis_client.pttl(keys.batch_key("b1")) > 0
    worker.run(*command)
    assert now(store).finished or redis_client.pttl(keys.batch_key("b1")) < 0


def test_a_retire_of_an_earlier_life_does_nothing_to_a_batch(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee, wire: Wire
) -> None:
    submit_batch(store, 1)
    worker.done(*worker.pop())
    wire.fate, wire.spare = Fate.LATE, 1
    retire(wire)
    store.delete("b1")
    submit_batch(store, 1)
    worker.done(*worker.pop())
    wire.send(*wire.late.pop())
    assert ownerless(redis_client) == {}


def test_a_message_that_is_kept_while_its_batch_is_retired_gets_an_end_too(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee, wire: Wire
) -> None:
    submit_batch(store, 1)
    store.cancel(now(store))
    wire.fate, wire.spare = Fate.LATE, 1
    retire(wire)
    assert worker.pop() == []
    wire.send(*wire.late.pop())
    assert ownerless(redis_client) == {}


def test_a_plain_request_cancelled_under_the_same_id_does_not_end_one_of_a_batch(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee, other: Lessee
) -> None:
    submitted = submit_batch(store, 1)
    (lease,) = worker.pop()
    redis_client.lpush(QUEUE, celery_message(submitted.ids[0]))
    other.done(*other.pop(), outcome="cancelled")
    worker.bury(lease, "cannot be read")
    assert counts(now(store)) == {"failed": 1}
    assert now(store).finished
