"""A batch's failures by error code: counted where requests end, taken back where they run again."""

from __future__ import annotations

import pytest
import redis
from kit.protocol.lessee import LIMITS, QUEUE, SEED, Lessee, now, submit_batch

from contract import naming
from contract.batch import Batch
from contract.errors import RequestRejected
from contract.failures import CodeFailures, failures_of, failures_text
from contract.index import IndexChunk, IndexEntry
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.failures import FailureReads
from contract.results import failure_meta

FAILED = "request_failed"


def codes(store: BatchStore) -> dict[str, int]:
    return {one.code: one.count for one in failures_of([now(store)])}


def reject(
    store: BatchStore, wrong: list[tuple[str, str]], followers: int = 0, **fields: str | int
) -> tuple[Batch, list[str]]:
    """Submit lines of which all are rejected with a code and a message; followers of the first."""
    listed = naming.turn_list(QUEUE, 6, "default", "b1")
    if followers:
        fields["identical"] = 0
    _, batch = store.create("b1", SEED, {"queue": QUEUE, "list": listed, **fields})
    leader = naming.request_id("b1", "c1")
    entries: list[IndexEntry] = [(n, f"c{n}", False) for n in range(1, len(wrong) + 1)]
    same: list[IndexEntry] = [(n + 100, f"f{n}", False, leader) for n in range(followers)]
    chunk = IndexChunk(len(wrong), "1" * 40, [*entries, *same])
    ids = chunk.request_ids("b1")[: len(wrong)]
    metas = [
        failure_meta(
            rid, RequestRejected(text, code=code), batch="b1", custom_id=entry[1], line=entry[0]
        )
        for rid, entry, (code, text) in zip(ids, entries, wrong, strict=True)
    ]
    store.enqueue(batch, listed, (0, SEED), chunk, [], [*zip(ids, metas, strict=True)], **LIMITS)
    return batch, ids


def test_failures_of_workers_are_counted_by_code_with_the_first_ones(
    worker: Lessee, store: BatchStore
) -> None:
    submitted = submit_batch(store, 8)
    leases = worker.pop()
    worker.done(leases[0])
    worker.done(*leases[1:], outcome="failed", keep=True)
    assert failures_of([now(store)]) == [CodeFailures(FAILED, 7, tuple(submitted.ids[1:6]))]
    (found,) = FailureReads.using(store).first([now(store)])
    assert (found.code, found.count, len(found.first)) == (FAILED, 7, 5)
    assert found.first[0].request_id == submitted.ids[1]
    assert found.first[0].message == "by w1"


def test_rejected_lines_are_counted_with_custom_id_line_and_message(store: BatchStore) -> None:
    odd = 'a "quoted" text: "error":{"code":"forged"}'
    _, ids = reject(store, [("unknown_field", odd), ("invalid_json", "x" * 1000)])
    first, second = FailureReads.using(store).first([now(store)])
    assert (first.code, first.count) == ("unknown_field", 1)
    only = first.first[0]
    assert (only.custom_id, only.request_id, only.line, only.message) == ("c1", ids[0], 1, odd)
    assert len(second.first[0].message) == 300
    assert failures_text(now(store)) == "2 of 2 failed: 1 unknown_field, 1 invalid_json"


def test_cancelled_and_expired_requests_are_not_failures(worker: Lessee, store: BatchStore) -> None:
    submitted = submit_batch(store, 3)
    worker.done(*worker.pop()[:1], outcome="expired", keep=True)
    store.cancel(submitted.batch)
    assert failures_of([now(store)]) == []
    assert failures_text(now(store)) == ""


def test_a_retry_takes_back_counts_and_first_ones_and_the_next_failure_counts_again(
    worker: Lessee, store: BatchStore
) -> None:
    submitted = submit_batch(store, 4)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    assert codes(store) == {FAILED: 4}
    assert store.retry(submitted.batch, ["failed"]) == 4
    assert "failures" not in now(store).fields
    first, *rest = worker.pop()
    worker.done(*rest)
    worker.done(first, outcome="failed", keep=True)
    assert failures_of([now(store)]) == [CodeFailures(FAILED, 1, (first.request_id,))]


def test_a_retry_of_a_retired_batch_takes_its_failures_back(
    worker: Lessee, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    assert worker.run("retire", "b1", submitted.batch.life, 60_000, 1, *submitted.ids) == 1
    assert codes(store) == {FAILED: 2}
    store.retry(submitted.batch, ["failed"])
    assert codes(store) == {}


def test_dead_letters_are_failures_until_they_run_again(worker: Lessee, store: BatchStore) -> None:
    submit_batch(store, 1)
    (lease,) = worker.pop()
    worker.bury(lease, "not JSON")
    assert codes(store) == {"invalid_json": 1}
    assert store.retry_dead() == 1
    assert codes(store) == {}


@pytest.mark.parametrize("followers", [0, 3])
def test_followers_count_as_lines_of_their_leaders_code(store: BatchStore, followers: int) -> None:
    _, ids = reject(store, [("max_tokens", "too many")], followers)
    assert failures_of([now(store)]) == [CodeFailures("max_tokens", 1 + followers, (ids[0],))]


def test_memory_is_bounded_whatever_codes_come(store: BatchStore) -> None:
    reject(store, [(f"code_{n % 300}", "x") for n in range(900)] + [("a b", "x"), ("c" * 99, "x")])
    found = failures_of([now(store)])
    assert len(found) == 21
    assert sum(one.count for one in found) == now(store).number("failed") == 902
    assert found[0].code == "other"
    assert all(len(one.first) <= 5 for one in found)


def test_failures_that_an_older_worker_ended_have_no_code(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 3)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    redis_client.hdel(keys.batch_key("b1"), "failures")  # what 0.2.0 leaves
    assert failures_of([now(store)]) == [CodeFailures("", 3)]
    assert failures_text(now(store)) == "3 of 3 failed: 3 of unknown code"
    assert FailureReads.using(store).first([now(store)])[0].count == 3
    store.retry(submitted.batch, ["failed"])
    assert codes(store) == {}


def test_after_a_retry_by_a_producer_of_0_2_0_only_the_number_is_known(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submit_batch(store, 3)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    redis_client.hincrby(keys.batch_key("b1"), "failed", -1)  # 0.2.0 leaves `failures` as it is
    assert failures_of([now(store)]) == [CodeFailures("", 2)]
    redis_client.hincrby(keys.batch_key("b1"), "failed", -2)
    assert failures_of([now(store)]) == []


def test_a_batch_that_is_deleted_and_submitted_again_begins_without_failures(
    store: BatchStore,
) -> None:
    reject(store, [("max_tokens", "too many")])
    store.delete("b1", force=True)
    submit_batch(store, 1)
    assert failures_of([now(store)]) == []


def test_several_queue_batches_are_read_as_one(worker: Lessee, store: BatchStore) -> None:
    for name, count in (("b1", 2), ("b2", 4)):
        submit_batch(store, count, batch_id=name)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    both = [now(store, "b1"), now(store, "b2")]
    (found,) = FailureReads.using(store).first(both)
    assert (found.code, found.count, len(found.first)) == (FAILED, 6, 5)
    assert FailureReads.using(store).first([]) == []
