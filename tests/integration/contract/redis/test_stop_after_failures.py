"""A batch is cancelled when too many of its requests fail, whoever ends them."""

from __future__ import annotations

import pytest
import redis
from kit.commands.support import finish
from kit.protocol.lessee import (
    LIMITS,
    Lessee,
    counts,
    now,
    one_more,
    result_of,
    submit_batch,
)

from contract.errors import RequestFailed, RequestRejected
from contract.redis import keys
from contract.redis.batches import BatchStore

ERROR = RequestFailed("it broke", code="broken")


def stopping(
    store: BatchStore, client: redis.Redis, count: int, stop_after: str, *, seal: bool = True
) -> list[str]:
    """Queue requests of a batch that stops; return their ids."""
    submitted = submit_batch(store, count, seal=seal)
    client.hset(keys.batch_key("b1"), "stop_after", stop_after)
    return submitted.ids


def test_a_batch_stops_at_its_number_of_failures_counted_over_all_workers(
    worker: Lessee, other: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    ids = stopping(store, redis_client, 20, "4")
    mine, theirs = worker.pop(3), other.pop(3)
    finish(worker, mine[:2], ERROR)
    finish(other, theirs[:1], RequestRejected("x", code="wrong"))
    assert now(store).status == "in_progress"
    with redis_client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(keys.BATCH_CANCEL_CHANNEL)
        heard.get_message(timeout=1)
        finish(other, theirs[1:2], ERROR)
        message = heard.get_message(timeout=5)
    assert message is not None
    assert message["data"] == b"b1"
    assert now(store).status == "cancelling"
    assert now(store).stopped
    # No submitter is there: the workers end what waits, with the reason.
    assert worker.pop() == []
    assert now(store).fields["reason"].startswith("stopped: 4 of 4 requests failed")
    error = result_of(redis_client, ids[-1])["warmq"]["error"]
    assert (error["code"], error["message"]) == ("cancelled", now(store).fields["reason"])
    finish(worker, mine[2:])
    finish(other, theirs[2:])
    ended = now(store)
    assert (ended.status, ended.finished) == ("cancelled", True)
    assert counts(ended) == {"completed": 2, "failed": 4, "cancelled": 14}


@pytest.mark.parametrize(
    ("failed", "completed", "status"),
    [(99, 0, "in_progress"), (100, 0, "cancelling"), (4, 96, "in_progress"), (5, 95, "cancelling")],
)
def test_a_share_is_judged_from_100_ended_requests(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore, failed: int, completed: int,
    status: str,
) -> None:  # fmt: skip
    stopping(store, redis_client, 200, "5%")
    leases = worker.pop(failed + completed)
    finish(worker, leases[failed:])
    finish(worker, leases[:failed], ERROR)
    assert now(store).status == status


def test_a_batch_that_has_nothing_left_is_not_cancelled(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    stopping(store, redis_client, 3, "3")
    finish(worker, worker.pop(), ERROR)
    assert now(store).status == "completed"


def test_a_batch_without_the_option_never_stops(worker: Lessee, store: BatchStore) -> None:
    submit_batch(store, 300)
    finish(worker, worker.pop(200), ERROR)
    assert now(store).status == "in_progress"


def test_after_a_retry_the_limit_counts_anew(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    stopping(store, redis_client, 10, "2")
    finish(worker, worker.pop(2), ERROR)
    store.cancel(now(store), "stopped")
    assert now(store).status == "cancelled"
    assert store.retry(now(store), ["cancelled"]) == 8  # the two failed ones stay
    batch = now(store)
    assert (batch.status, batch.stopped, "reason" in batch.fields) == ("in_progress", False, False)
    finish(worker, worker.pop(1), ERROR)
    assert now(store).status == "in_progress"
    finish(worker, worker.pop(1), ERROR)
    assert now(store).status == "cancelling"


def test_a_stopped_batch_that_a_producer_of_0_2_0_retries_is_not_stopped(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    stopping(store, redis_client, 4, "2")
    finish(worker, worker.pop(2), ERROR)
    assert now(store).stopped
    redis_client.hdel(keys.batch_key("b1"), "cancelling")  # all that its script takes back
    assert not now(store).stopped


def test_workers_know_the_reason_of_a_cancel_without_its_user(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 3)
    store.begin_cancel(submitted.batch, "stopped: another part failed")
    assert worker.pop() == []
    error = result_of(redis_client, submitted.ids[0])["warmq"]["error"]
    assert (error["code"], error["message"]) == ("cancelled", "stopped: another part failed")
    assert store.retry(now(store), ["cancelled"]) == 3
    assert "reason" not in now(store).fields
    store.begin_cancel(now(store))
    assert worker.pop() == []
    error = result_of(redis_client, submitted.ids[0])["warmq"]["error"]
    assert error["message"] == "cancelled by the user"


def test_a_batch_stopped_before_its_submit_ended_can_be_submitted_to_its_end_after_a_retry(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    stopping(store, redis_client, 4, "2", seal=False)
    finish(worker, worker.pop(2), ERROR)
    store.cancel(now(store))
    assert now(store).status == "cancelled"
    assert store.retry(now(store), ["cancelled", "failed"]) == 4
    assert now(store).status == "validating"


def test_a_batch_stopped_before_its_submit_ended_takes_the_other_lines_and_cancels_them(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 4, seal=False)
    redis_client.hset(keys.batch_key("b1"), "stop_after", "2")
    finish(worker, worker.pop(2), ERROR)
    assert worker.pop() == []
    assert (now(store).status, now(store).finished) == ("cancelling", False)
    chunk, messages = one_more(submitted, 5)
    send = (submitted.batch, submitted.list_key, submitted.end, chunk, messages, [])
    answer = store.enqueue(*send, **LIMITS)
    assert (answer.answer, answer.text) == ("ok", "stopped")
    assert store.seal(submitted.batch, (chunk.cursor, chunk.digest)).answer == "ok"
    assert worker.pop() == []
    ended = now(store)
    assert (ended.status, counts(ended)) == ("cancelled", {"failed": 2, "cancelled": 3})
    (request_id,) = chunk.request_ids("b1")
    error = result_of(redis_client, request_id)["warmq"]["error"]
    assert (error["code"], error["message"]) == ("cancelled", ended.fields["reason"])
    assert store.retry(now(store), ["cancelled"]) == 3
    assert now(store).status == "in_progress"  # it has all its lines


def test_a_user_who_cancels_a_stopped_batch_ends_it_without_the_other_lines(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 4, seal=False)
    redis_client.hset(keys.batch_key("b1"), "stop_after", "2")
    finish(worker, worker.pop(2), ERROR)
    store.cancel(now(store))
    assert now(store).finished
    chunk, messages = one_more(submitted, 5)
    send = (submitted.batch, submitted.list_key, submitted.end, chunk, messages, [])
    assert store.enqueue(*send, **LIMITS).answer == "sealed"


def test_the_limit_of_a_batch_can_be_changed_and_removed(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    stopping(store, redis_client, 10, "1")
    store.limit_failures(now(store), "3")
    finish(worker, worker.pop(2), ERROR)
    assert now(store).status == "in_progress"
    store.limit_failures(now(store), "")
    finish(worker, worker.pop(3), ERROR)
    assert now(store).status == "in_progress"
    gone = now(store)
    assert store.delete("b1", force=True)
    store.limit_failures(gone, "3")
    assert store.batch("b1") is None
