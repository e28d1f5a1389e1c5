"""CREATE, ENQUEUE, SEAL, CANCEL and RETRY against their holes."""

from __future__ import annotations

import orjson
import pytest
import redis
from kit.protocol.lessee import (
    LIMITS,
    QUEUE,
    SEED,
    Lease,
    Lessee,
    counts,
    now,
    one_more,
    queued_ids,
    stored,
    submit_batch,
)

from contract.errors import RequestRejected
from contract.index import IndexChunk
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.results import failure_meta

# -- CREATE, ENQUEUE, SEAL -------------------------------------------------------------------


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
    lists = (sealed.list_key, cancelled.list_key, deleted.list_key)
    assert [redis_client.llen(key) for key in lists] == [1, 1, 1]


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


# -- CANCEL ----------------------------------------------------------------------------------


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


# -- RETRY -----------------------------------------------------------------------------------


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
    assert worker.run("retry", "b1", submitted.batch.life, *late) == 0
    assert counts(now(store)) == {"completed": 2}
    assert now(store).finished


def test_rejected_lines_are_not_retried(store: BatchStore, worker: Lessee) -> None:
    submitted = submit_batch(store, 1)
    (lease,) = worker.pop()
    worker.done(lease, outcome="failed", keep=False)
    assert store.retry(submitted.batch, ["failed"]) == 0
    assert counts(now(store)) == {"failed": 1}


def queued_at(lease: Lease) -> int:
    """Return the time in ms from which a worker measures a request's time in the queue."""
    return int(orjson.loads(lease.message)["headers"]["warmq"]["created"])


@pytest.mark.parametrize("ended", ["failed", "cancelled"])
def test_a_retried_request_counts_its_time_in_the_queue_anew(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee, ended: str
) -> None:
    submitted = submit_batch(store, 3)
    first, *_ = worker.pop()
    worker.done(first, outcome=ended, keep=True)
    before = store.now_ms()
    assert store.retry(submitted.batch, [ended]) == 1
    (again,) = worker.pop()
    assert int(submitted.batch.created) <= before <= queued_at(again) <= store.now_ms()


def test_requests_of_a_cancelled_batch_that_still_wait_count_from_its_retry(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 2)
    store.cancel(submitted.batch)
    before = store.now_ms()
    store.retry(submitted.batch, ["cancelled"])
    assert len(worker.pop()) == 2
    assert all(before <= at <= store.now_ms() for at in worker.requeued_at)
    assert len(worker.requeued_at) == 2


def test_a_retried_dead_letter_counts_its_time_in_the_queue_anew(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 1)
    (lease,) = worker.pop()
    worker.bury(lease, "unreadable")
    before = store.now_ms()
    assert store.retry_dead([one["id"] for one in store.dead_letters()]) == 1
    (again,) = worker.pop()
    assert queued_at(again) >= before
