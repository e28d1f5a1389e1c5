"""Dead letters, the life of results, and a Redis without memory."""

from __future__ import annotations

import asyncio

import orjson
import pytest
import redis
from kit.protocol.lessee import (
    LIMITS,
    QUEUE,
    SEED,
    Lessee,
    Submitted,
    celery_message,
    chat,
    counts,
    now,
    stored,
    submit_batch,
    writer,
)
from kit.protocol.script_keys import kept_key

from contract.errors import StoreUnavailable
from contract.index import IndexChunk
from contract.openai.body import CHAT_URL
from contract.redis import keys
from contract.redis.batches import BatchStore
from worker.drain.leases import Leases
from worker.drain.sweeper import retire_some
from worker.settings import WorkerSettings


def one_more(submitted: Submitted, line: int) -> tuple[IndexChunk, list[bytes]]:
    """Return a chunk of one line that follows what was submitted."""
    chunk = IndexChunk(line, f"{line:040x}", [(line, f"c{line}", False)])
    (rid,) = chunk.request_ids(submitted.id)
    message = writer(submitted.batch).write(rid, f"c{line}", line, CHAT_URL, orjson.dumps(chat()))
    return chunk, [message]


# -- dead letters ----------------------------------------------------------------------------


def poisoned(worker: Lessee) -> None:
    """Make the one queued request a poison dead letter."""
    for lists in ([], [], *[[keys.suspects_list(QUEUE)]] * 2):
        leases = worker.pop(lists=lists)
        worker.release(*leases, died=leases)


def test_a_dead_letter_can_run_again(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 1)
    poisoned(worker)
    assert (now(store).status, counts(now(store))) == ("completed", {"failed": 1})
    (letter,) = store.dead_letters()
    assert store.retry_dead([letter["id"]]) == 1
    assert store.retry_dead([letter["id"]]) == 0
    assert now(store).status == "in_progress"
    (lease,) = worker.pop()
    assert (lease.request_id, lease.deaths) == (submitted.ids[0], 0)
    worker.done(lease)
    assert (now(store).status, counts(now(store))) == ("completed", {"completed": 1})
    assert not list(store.dead_letters())


def test_an_unreadable_dead_letter_stays(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    redis_client.lpush(QUEUE, b"garbage")
    worker.pop()
    (letter,) = store.dead_letters()
    assert store.retry_dead([letter["id"], "999"]) == 0
    assert len(list(store.dead_letters())) == 1


def test_a_dead_letter_that_was_answered_elsewhere_undoes_nothing(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 2)
    lease, _ = worker.pop()  # of a finished batch nothing is committed any more
    worker.bury(lease, "unreadable")
    redis_client.delete(keys.result_key(submitted.ids[0]))
    worker.done(lease)  # a stale holder's success
    (letter,) = store.dead_letters()
    before = now(store).fields
    assert store.retry_dead([letter["id"]]) == 0
    assert now(store).fields == before
    assert stored(redis_client, submitted.ids[0])
    assert not list(store.dead_letters())


def test_a_retried_dead_letter_of_a_finished_batch_keeps_the_batch_alive(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 1)
    redis_client.zadd(keys.batch_key("b1", "columns"), {"kept": 1})
    poisoned(worker)
    asyncio.run(retire(redis_url))
    assert redis_client.pttl(keys.batch_key("b1")) > 0
    store.retry_dead([letter["id"] for letter in store.dead_letters()])
    parts = ["", "index", "finished", "failed", "columns"]
    ttls = [redis_client.pttl(keys.batch_key("b1", part)) for part in parts]
    assert all(ttl < 0 for ttl in ttls), ttls


@pytest.mark.parametrize("left_by", ["delete", "retire"])
def test_kept_columns_that_0_2_0_leaves_behind_are_none_of_a_later_batch(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee, left_by: str
) -> None:
    # Given a batch that 0.2.0 deleted, or gave its expiry: it does not know the kept columns.
    columns = keys.batch_key("b1", "columns")
    redis_client.zadd(columns, {"7\nold": 7})
    if left_by == "retire":
        redis_client.zadd(keys.BATCHES, {"b1": 1})
        worker.sweep()
        assert not redis_client.exists(columns)
    submit_batch(store, 1)
    assert list(store.columns("b1", 1)) == []


# -- life of results -------------------------------------------------------------------------


async def retire(url: str) -> int:
    """Run the worker's retirement step once."""
    leases = Leases(WorkerSettings(redis_url=url, engine="simulated", result_ttl_s=60), "w1")
    try:
        return await retire_some(leases)
    finally:
        await leases.close()


def test_results_of_an_unfinished_batch_never_expire_and_get_their_ttl_at_its_end(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 3)
    redis_client.zadd(keys.batch_key("b1", "columns"), {"kept": 3})
    worker.done(*worker.pop(2))
    assert asyncio.run(retire(redis_url)) == 0
    assert redis_client.pttl(keys.result_key(submitted.ids[0])) == -1
    worker.done(*worker.pop())
    assert redis_client.pttl(keys.result_key(submitted.ids[0])) == -1
    assert asyncio.run(retire(redis_url)) == 3
    parts = [
        redis_client.pttl(keys.batch_key("b1", p)) for p in ("", "index", "finished", "columns")
    ]
    results = [redis_client.pttl(keys.result_key(rid)) for rid in submitted.ids]
    # Results first: a batch that is still listed must lead to what is left of it.
    assert all(0 < ttl <= 60_000 for ttl in results + parts)
    assert max(results) <= min(parts)
    assert asyncio.run(retire(redis_url)) == 0


def test_retry_takes_the_expiry_back(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 2)
    first, second = worker.pop()
    worker.done(first)
    worker.done(second, outcome="failed", keep=True)
    asyncio.run(retire(redis_url))
    assert store.retry(submitted.batch, ["failed"]) == 1
    assert redis_client.pttl(keys.result_key(submitted.ids[0])) == -1
    assert redis_client.pttl(keys.batch_key("b1")) == -1


def test_a_retirement_under_way_leaves_a_retried_batch_alone(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 1)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    # Given a retirement that has looked and was then overtaken by a retry
    store.retry(submitted.batch, ["failed"])
    redis_client.zadd(keys.RETIRING, {"b1": 1})
    asyncio.run(retire(redis_url))
    # Then the unfinished batch does not expire
    assert redis_client.pttl(keys.batch_key("b1")) == -1
    assert redis_client.zcard(keys.RETIRING) == 0
    worker.done(*worker.pop())
    assert asyncio.run(retire(redis_url)) == 1


def test_a_request_whose_kept_message_is_gone_stays_as_it_ended(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 3)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    redis_client.delete(kept_key("b1", submitted.ids[1]))
    assert store.retry(submitted.batch, ["failed"]) == 2
    assert store.retryable(submitted.batch) == {"failed": 1}
    assert stored(redis_client, submitted.ids[1])
    assert counts(now(store)) == {"failed": 1}
    worker.done(*worker.pop())
    assert (now(store).status, counts(now(store))) == ("completed", {"completed": 2, "failed": 1})


def test_a_dead_letter_whose_message_is_gone_is_forgotten(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    redis_client.lpush(QUEUE, b"garbage")
    Lessee(redis_client, "w9").pop()
    (letter,) = store.dead_letters()
    record = redis_client.hget("warmq:dead", letter["id"])
    assert record is not None
    parts = record.split(b"\0")
    parts[3] = b"r1"
    redis_client.hset("warmq:dead", letter["id"], b"\0".join(parts))
    redis_client.delete(f"warmq:dead:{letter['id']}")
    assert store.retry_dead() == 0
    assert list(store.dead_letters()) == []


# -- Redis without memory --------------------------------------------------------------------


@pytest.fixture
def fill(redis_client: redis.Redis):
    """Return a function that makes Redis refuse whatever may grow its memory."""

    def run() -> None:
        redis_client.config_set("maxmemory", redis_client.info("memory")["used_memory"] // 2)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            redis_client.set("x", "y")

    yield run
    redis_client.config_set("maxmemory", 0)


def test_a_full_redis_refuses_enqueue_and_serves_everything_that_ends_work(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee, fill
) -> None:
    submitted = submit_batch(store, 6)
    other = submit_batch(store, 1, batch_id="open", seal=False)
    redis_client.lpush(QUEUE, b"garbage")
    chunk, messages = one_more(other, 2)
    worker.allow_sweep()
    fill()
    # ENQUEUE refuses
    answer = store.enqueue(other.batch, other.list_key, other.end, chunk, messages, [], **LIMITS)
    assert answer.answer == "full"
    assert "bytes" in answer.text
    # POP, RENEW, RELEASE, SWEEP and DONE work
    *leases, expired = worker.pop(6, lease_ms=0)
    assert len(leases) == 5
    assert len(list(store.dead_letters())) == 1
    assert worker.renew(*(lease.id for lease in leases)) == ([], [expired.id])
    assert worker.sweep() == 1
    assert worker.release(*leases[3:]) == 2
    assert worker.done(*leases[:2]) == 2
    assert worker.done(leases[2], outcome="failed", keep=True) == 1
    # CANCEL, SEAL and DELETE too
    assert store.cancel(submitted.batch) == 3
    assert now(store).status == "cancelled"
    assert store.seal(other.batch, other.end).answer == "ok"
    assert store.delete("b1")


def test_a_full_redis_takes_a_chunk_whose_room_was_looked_for_before(
    store: BatchStore, worker: Lessee, fill
) -> None:
    # As in `producer run`, which looks before it reads a chunk; results may fill Redis meanwhile
    other = submit_batch(store, 1, batch_id="open", seal=False)
    chunk, messages = one_more(other, 2)
    fill()
    answer = store.enqueue(
        other.batch, other.list_key, other.end, chunk, messages, [],
        high_water=1e9, high_water_requests=1_000_000,
    )  # fmt: skip
    assert answer.answer == "ok"
    assert len(worker.pop()) == 2


def test_a_full_redis_refuses_a_new_batch_with_a_remedy_and_takes_a_retry(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee, fill
) -> None:
    submitted = submit_batch(store, 1)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    fill()
    with pytest.raises(StoreUnavailable, match="delete finished batches, or raise maxmemory"):
        store.create("b2", SEED, {"queue": QUEUE})
    assert store.retry(submitted.batch, ["failed"]) == 1
    assert not redis_client.exists(f"celery-task-meta-{submitted.ids[0]}")
    assert len(worker.pop()) == 1


def test_a_plain_celery_message_needs_no_batch(redis_client: redis.Redis, worker: Lessee) -> None:
    redis_client.lpush(QUEUE, celery_message("plain"))
    (lease,) = worker.pop()
    assert worker.done(lease) == 1
    assert not redis_client.keys("warmq:batch*")
