"""CREATE, ENQUEUE, SEAL, CANCEL, RETRY, DELETE, dead letters and retirement against their holes."""

from __future__ import annotations

import asyncio

import orjson
import pytest
import redis
from lessee import (
    LIMITS,
    QUEUE,
    SEED,
    Lessee,
    Submitted,
    celery_message,
    chat,
    queued_ids,
    stored,
    submit_batch,
    writer,
)

from contract import keys
from contract.batch import Batch
from contract.body import CHAT_URL
from contract.errors import RequestRejected, StoreUnavailable
from contract.results import failure_meta
from contract.store import BatchStore, IndexChunk
from demo.stack import eventually
from worker.leases import Leases
from worker.settings import WorkerSettings


@pytest.fixture
def worker(redis_client: redis.Redis) -> Lessee:
    return Lessee(redis_client, "w1")


def now(store: BatchStore, batch_id: str = "b1") -> Batch:
    """Return the batch as it is now."""
    batch = store.batch(batch_id)
    assert batch is not None
    return batch


def counts(batch: Batch) -> dict[str, int]:
    """Return the counters that are not zero."""
    names = ("completed", "failed", "cancelled", "expired")
    return {name: batch.number(name) for name in names if batch.number(name)}


def one_more(submitted: Submitted, line: int) -> tuple[IndexChunk, list[bytes]]:
    """Return a chunk of one line that follows what was submitted."""
    chunk = IndexChunk(line, f"{line:040x}", [(line, f"c{line}", False)])
    (rid,) = chunk.request_ids(submitted.id)
    message = writer(submitted.batch).write(rid, f"c{line}", line, CHAT_URL, orjson.dumps(chat()))
    return chunk, [message]


# -- CREATE, ENQUEUE, SEAL --------------------------------------------------------


def test_create_twice_finds_the_batch_as_it_is(store: BatchStore) -> None:
    new, first = store.create("b1", SEED, {"queue": QUEUE, "model": "a"})
    again, second = store.create("b1", "ff" * 20, {"queue": "other"})
    assert (new, again) == (True, False)
    assert first.fields == second.fields
    assert second.fields["digest"] == SEED


def test_enqueue_repeated_after_a_lost_reply_queues_nothing_twice(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2, seal=False)
    chunk, messages = one_more(submitted, 3)
    send = (submitted.batch, submitted.list_key, submitted.end, chunk, messages, [])
    assert store.enqueue(*send, **LIMITS).answer == "ok"
    again = store.enqueue(*send, **LIMITS)
    assert (again.answer, again.cursor, again.digest) == ("moved", 3, chunk.digest)
    assert redis_client.llen(submitted.list_key) == 3
    assert now(store).number("total") == 3
    assert len(list(store.index("b1"))) == 2


def test_enqueue_refuses_a_chunk_that_follows_another_file(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2, seal=False)
    chunk, messages = one_more(submitted, 3)
    answer = store.enqueue(
        submitted.batch, submitted.list_key, (2, "ee" * 20), chunk, messages, [], **LIMITS
    )
    assert (answer.answer, answer.cursor, answer.digest) == ("moved", *submitted.end)
    assert redis_client.llen(submitted.list_key) == 2


def test_enqueue_into_a_sealed_cancelled_or_deleted_batch_is_refused(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    sealed = submit_batch(store, 1, batch_id="sealed")
    cancelled = submit_batch(store, 1, batch_id="cancelled", seal=False)
    store.cancel(cancelled.batch)
    deleted = submit_batch(store, 1, batch_id="deleted", seal=False)
    redis_client.delete(keys.batch_key("deleted"))
    answers = []
    for submitted in (sealed, cancelled, deleted):
        chunk, messages = one_more(submitted, 2)
        answer = store.enqueue(
            submitted.batch, submitted.list_key, submitted.end, chunk, messages, [], **LIMITS
        )
        answers.append(answer.answer)
    assert answers == ["sealed", "sealed", "gone"]
    assert redis_client.llen(sealed.list_key) == 3


def test_rejected_lines_are_counted_and_answered_in_the_same_script(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    _, batch = store.create("b1", SEED, {"queue": QUEUE})
    chunk = IndexChunk(1, "11" * 20, [(1, "line-1", True)])
    (rid,) = chunk.request_ids("b1")
    error = RequestRejected("bad", field="prompt")
    meta = failure_meta(rid, error, batch="b1", custom_id="line-1", line=1)
    answer = store.enqueue(batch, QUEUE, (0, SEED), chunk, [], [(rid, meta)], **LIMITS)
    assert answer.answer == "ok"
    assert counts(now(store)) == {"failed": 1}
    assert not now(store).finished
    assert store.seal(batch, (1, "11" * 20), "no valid line").answer == "ok"
    assert (now(store).status, now(store).fields["reason"]) == ("failed", "no valid line")
    assert stored(redis_client, rid)


def test_enqueue_takes_more_messages_than_luas_stack(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 9_000)
    assert redis_client.llen(submitted.list_key) == 9_000
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids


def test_seal_repeated_or_at_another_end_changes_nothing(store: BatchStore) -> None:
    submitted = submit_batch(store, 1, seal=False)
    assert store.seal(submitted.batch, (2, "ee" * 20)).answer == "moved"
    assert now(store).status == "validating"
    assert store.seal(submitted.batch, submitted.end).answer == "ok"
    assert store.seal(submitted.batch, submitted.end).answer == "sealed"


def test_enqueue_refuses_above_the_high_water_mark_as_a_count(store: BatchStore) -> None:
    submitted = submit_batch(store, 5, seal=False)
    chunk, messages = one_more(submitted, 6)
    answer = store.enqueue(
        submitted.batch, submitted.list_key, submitted.end, chunk, messages, [],
        high_water=0.6, high_water_requests=5,
    )  # fmt: skip
    assert answer.answer == "full"
    assert "5 requests wait" in answer.text
    assert now(store).number("total") == 5


# -- CANCEL -----------------------------------------------------------------------


def test_cancel_of_queued_requests_ends_without_a_worker(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 4)
    assert store.cancel(submitted.batch) == 4
    batch = now(store)
    assert (batch.status, counts(batch)) == ("cancelled", {"cancelled": 4})
    assert worker.pop() == []
    assert redis_client.llen(submitted.list_key) == 0
    assert counts(now(store)) == {"cancelled": 4}


def test_cancel_of_leased_requests_tells_the_workers_and_beats_their_failure(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 2)
    leases = worker.pop()
    with redis_client.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe(keys.CANCEL_CHANNEL, keys.BATCH_CANCEL_CHANNEL)
        assert store.cancel_request(submitted.batch, "c1") == 1
        assert store.cancel_request(submitted.batch, "c1") == 0
        store.cancel(submitted.batch)
        heard: list[tuple[bytes, bytes]] = []
        while len(heard) < 3:
            message = listener.get_message(timeout=5)
            heard += [(message["channel"], message["data"])] if message else []
    assert heard == [
        (b"warmq:cancel", orjson.dumps(submitted.ids[:1])),
        (b"warmq:batch-cancel", b"b1"),
        (b"warmq:cancel", orjson.dumps(submitted.ids[1:])),
    ]
    assert worker.done(*leases, outcome="failed", keep=True) == 0
    assert counts(now(store)) == {"cancelled": 2}
    assert now(store).status == "cancelled"


def test_cancel_of_an_open_batch_seals_it(store: BatchStore) -> None:
    submitted = submit_batch(store, 2, seal=False)
    store.cancel(submitted.batch)
    assert now(store).status == "cancelled"


def test_cancel_leaves_ended_requests_and_ended_batches_alone(
    store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 2)
    first, second = worker.pop()
    worker.done(first)
    assert store.cancel(submitted.batch) == 1
    assert counts(now(store)) == {"completed": 1, "cancelled": 1}
    worker.done(second, outcome="cancelled", keep=True)
    done = submit_batch(store, 1, batch_id="done")
    worker.done(*worker.pop())
    assert store.cancel(done.batch) == 0
    assert now(store, "done").status == "completed"


def test_cancel_of_a_deleted_batch_leaves_no_ghost(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2)
    redis_client.delete(keys.batch_key("b1"))
    assert store.cancel(submitted.batch) == 0
    assert not redis_client.exists(keys.batch_key("b1"), *map(keys.result_key, submitted.ids))


# -- RETRY ------------------------------------------------------------------------


def test_retry_runs_failed_requests_again_and_resets_their_counts(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 3)
    leases = worker.pop()
    worker.release(leases[0], died=leases[:1])
    (first,) = worker.pop()
    worker.done(first, leases[1], outcome="failed", keep=True)
    worker.done(leases[2])
    assert now(store).status == "completed"
    assert store.retry(submitted.batch, ["failed"]) == 2
    assert (now(store).status, counts(now(store))) == ("in_progress", {"completed": 1})
    again = worker.pop()
    assert [(lease.request_id, lease.returns, lease.deaths) for lease in again] == [
        (submitted.ids[0], 0, 0), (submitted.ids[1], 0, 0),
    ]  # fmt: skip
    worker.done(*again)
    assert counts(now(store)) == {"completed": 3}
    assert now(store).finished
    assert store.retry(submitted.batch, ["failed"]) == 0


def test_retry_of_cancelled_requests_that_are_still_queued_runs_each_once(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 4)
    (running,) = worker.pop(1)
    store.cancel(submitted.batch)
    worker.done(running, outcome="cancelled", keep=True)
    assert store.retry(submitted.batch, ["cancelled"]) == 4
    again = worker.pop()
    assert sorted(lease.request_id for lease in again) == sorted(submitted.ids)
    worker.done(*again)
    assert (now(store).status, counts(now(store))) == ("completed", {"completed": 4})
    assert redis_client.llen(submitted.list_key) == 0


def test_retry_of_cancelled_requests_that_pop_has_met_runs_each_once(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 3)
    store.cancel(submitted.batch)
    assert worker.pop() == []
    assert store.retry(submitted.batch, ["cancelled"]) == 3
    worker.done(*worker.pop())
    assert (now(store).status, counts(now(store))) == ("completed", {"completed": 3})


def test_a_retry_that_comes_late_undoes_nothing_that_ran_since(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    """Two `producer retry` at once: the slower one names outcomes that are no more."""
    submitted = submit_batch(store, 2)
    leases = worker.pop()
    worker.done(leases[0], outcome="failed", keep=True)
    worker.done(leases[1], outcome="cancelled", keep=True)
    late = [submitted.ids[0], "failed", submitted.ids[1], "cancelled"]
    assert store.retry(submitted.batch, ["failed", "cancelled"]) == 2
    worker.done(*worker.pop())
    assert worker.run("retry", "b1", submitted.batch.created, *late) == 0
    assert counts(now(store)) == {"completed": 2}
    assert now(store).finished


def test_rejected_lines_are_not_retried(store: BatchStore, worker: Lessee) -> None:
    submitted = submit_batch(store, 1)
    (lease,) = worker.pop()
    worker.done(lease, outcome="failed", keep=False)
    assert store.retry(submitted.batch, ["failed"]) == 0
    assert counts(now(store)) == {"failed": 1}


# -- DELETE -----------------------------------------------------------------------


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
    left = {key for key in redis_client.keys("*") if key != keys.LEASE_SEQ.encode()}
    assert left == set()


def submit_later(store: BatchStore, old: Submitted, count: int) -> Submitted:
    """Submit again under the same id; batches are told apart by the ms of their creation."""

    def later() -> bool:
        seconds, micros = store.redis.time()
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
    assert worker.run("delete", "b1", now(store).created) == 1
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


# -- dead letters -------------------------------------------------------------------


def poisoned(worker: Lessee) -> None:
    """Make the one queued request a poison dead letter."""
    for lists in ([], [], [keys.suspects_list(QUEUE)]):
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
    assert store.dead_letters() == []


def test_an_unreadable_dead_letter_stays(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    redis_client.lpush(QUEUE, b"garbage")
    worker.pop()
    (letter,) = store.dead_letters()
    assert store.retry_dead([letter["id"], "999"]) == 0
    assert len(store.dead_letters()) == 1


def test_a_dead_letter_that_was_answered_elsewhere_undoes_nothing(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 1)
    (lease,) = worker.pop()
    worker.bury(lease, "unreadable")
    redis_client.delete(keys.result_key(submitted.ids[0]))
    worker.done(lease)  # a stale holder's success
    (letter,) = store.dead_letters()
    before = now(store).fields
    assert store.retry_dead([letter["id"]]) == 0
    assert now(store).fields == before
    assert stored(redis_client, submitted.ids[0])
    assert store.dead_letters() == []


def test_a_retried_dead_letter_of_a_finished_batch_keeps_the_batch_alive(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 1)
    poisoned(worker)
    asyncio.run(retire(redis_url))
    assert redis_client.pttl(keys.batch_key("b1")) > 0
    store.retry_dead([letter["id"] for letter in store.dead_letters()])
    parts = ["", "index", "finished", "failed"]
    ttls = [redis_client.pttl(keys.batch_key("b1", part)) for part in parts]
    assert all(ttl < 0 for ttl in ttls), ttls


# -- life of results ------------------------------------------------------------------


async def retire(url: str) -> int:
    """Run the worker's retirement step once."""
    leases = Leases(WorkerSettings(redis_url=url, engine="simulated", result_ttl_s=60), "w1")
    try:
        return await leases.retire_some()
    finally:
        await leases.close()


def test_results_of_an_unfinished_batch_never_expire_and_get_their_ttl_at_its_end(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 3)
    worker.done(*worker.pop(2))
    assert asyncio.run(retire(redis_url)) == 0
    assert redis_client.pttl(keys.result_key(submitted.ids[0])) == -1
    worker.done(*worker.pop())
    assert redis_client.pttl(keys.result_key(submitted.ids[0])) == -1
    assert asyncio.run(retire(redis_url)) == 3
    parts = [redis_client.pttl(keys.batch_key("b1", p)) for p in ("", "index", "finished")]
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


# -- Redis without memory ----------------------------------------------------------------


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
    assert len(store.dead_letters()) == 1
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


def test_a_full_redis_refuses_a_new_batch_and_a_retry_with_a_remedy(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee, fill
) -> None:
    submitted = submit_batch(store, 1)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    fill()
    with pytest.raises(StoreUnavailable, match="delete finished batches, or raise maxmemory"):
        store.create("b2", SEED, {"queue": QUEUE})
    with pytest.raises(StoreUnavailable, match="Redis is full"):
        store.retry(submitted.batch, ["failed"])
    assert counts(now(store)) == {"failed": 1}
    assert stored(redis_client, submitted.ids[0])


def test_a_plain_celery_message_needs_no_batch(redis_client: redis.Redis, worker: Lessee) -> None:
    redis_client.lpush(QUEUE, celery_message("plain"))
    (lease,) = worker.pop()
    assert worker.done(lease) == 1
    assert not redis_client.keys("warmq:batch*")
