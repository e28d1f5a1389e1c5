"""What requests cost their tenants: however they end, while others come, when they are removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import redis
from kit.protocol.lessee import QUEUE, Lease, Lessee, chat, submit_batch
from kit.protocol.turn_steps import batches_of, by_batch, end, report, report_each, score

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.tenants import Tenant

#: How a worker ends what it does not complete: outcome, and whether its message is kept.
NOT_COMPLETED = [("failed", True), ("failed", False), ("cancelled", True), ("expired", True)]


@pytest.mark.parametrize(("outcome", "keep"), NOT_COMPLETED)
def test_who_does_not_complete_does_not_take_every_turn(
    store: BatchStore, worker: Lessee, outcome: str, keep: bool
) -> None:
    submit_batch(store, 6000, batch_id="ends", tenant="a")
    for _ in range(2):
        end(worker, worker.pop(32), outcome, keep=keep)
    submit_batch(store, 640, batch_id="good", tenant="b")
    served: Counter[str] = Counter()
    first: int | None = None
    while served["good"] < 320:
        by = by_batch(worker.pop(32))
        end(worker, by.get("ends", []), outcome, keep=keep)
        report(worker, by.get("good", []), 7, 3)
        served.update({name: len(leases) for name, leases in by.items()})
        if first is None and served["good"]:
            first = served["ends"]
        assert served.total() < 7000
    assert first is not None and first <= 32
    assert served["ends"] <= 2000  # a rejection costs less than an answer, but not nothing


@pytest.mark.parametrize("way", ["buried", "batch deleted", "request cancelled"])
def test_an_ending_of_any_kind_is_charged(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis, way: str
) -> None:
    submitted = submit_batch(store, 100, batch_id="b", tenant="a")
    submit_batch(store, 100, batch_id="other", tenant="z")
    leases = worker.pop(32)
    assert batches_of(leases) == ["b"] * 32
    if way == "buried":
        for lease in leases:
            worker.bury(lease, "unreadable")
    elif way == "batch deleted":
        store.delete("b", force=True)
        end(worker, leases, "cancelled", keep=True)
    else:
        for n in range(32):
            store.cancel_request(submitted.batch, f"c{n + 1}")
        end(worker, leases, "cancelled", keep=True)
    assert score(redis_client, "a") >= 32


def test_a_hand_back_that_was_nobodys_fault_is_free(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis
) -> None:
    submit_batch(store, 100, batch_id="b", tenant="a")
    worker.release(*worker.pop(32))
    worker.run("done", worker.worker, worker.ttl_ms, *_moved_to_another_lease(worker.pop(32)))
    assert score(redis_client, "a") == 0


def _moved_to_another_lease(leases: Sequence[Lease]) -> list[object]:
    return [part for lease in leases for part in (lease.id, "r", "", "", "", 0, 0, 0, b"")]


def test_who_reports_no_tokens_has_turns(store: BatchStore, worker: Lessee) -> None:
    for name in ("a", "b"):
        submit_batch(store, 3000, batch_id=name, tenant=name)
    served: Counter[str] = Counter()
    for _ in range(40):
        leases = worker.pop(32)
        report(worker, leases, 0, 0)
        served.update(batches_of(leases))
    assert served["a"] == pytest.approx(served["b"], abs=64)


def test_without_reported_tokens_larger_requests_cost_more(
    store: BatchStore, worker: Lessee
) -> None:
    for name, size in (("small", 4_000), ("large", 40_000)):
        bodies = [chat("word " * (size // 5))] * (900 if name == "small" else 200)
        submit_batch(store, bodies=bodies, batch_id=name, tenant=name)
    served: Counter[str] = Counter()
    for _ in range(20):
        leases = worker.pop(32)
        report(worker, leases, 0, 0)
        served.update(batches_of(leases))
    assert served["small"] > 4 * served["large"]


# -- a newcomer does not wait behind charges that prove too high, nor behind a weight of the past --


@pytest.mark.parametrize("tenants", [["b"], ["b", "c", "d"]])
@pytest.mark.parametrize("kind", ["text", "picture"])
@pytest.mark.parametrize("of_one", [False, True])
def test_a_newcomer_does_not_wait_for_what_is_refunded(
    store: BatchStore, worker: Lessee, tenants: list[str], kind: str, of_one: bool
) -> None:
    long = "word " * 40_000 if kind == "text" else "data:image/png;base64," + "A" * 200_000
    bodies = [chat(long)] * 64 + [chat()] * 3000
    submit_batch(store, bodies=bodies, batch_id="a", tenant="one" if of_one else "a")
    first = worker.pop(64)
    for name in tenants:
        submit_batch(store, 64, batch_id=name, tenant="one" if of_one else name)
    for lease in first:  # each refund in a step of its own
        report(worker, [lease], 90, 10)
    served: Counter[str] = Counter()
    for _ in range(1 + 2 * len(tenants)):
        leases = worker.pop(32)
        report(worker, leases, 90, 10)
        served.update(batches_of(leases))
    assert all(served[name] for name in tenants)


@pytest.mark.parametrize(("context", "highest"), [(0, 16384 + 64), (2048, 2048), (40_000, 40_000)])
@pytest.mark.parametrize("known", [False, True])
def test_no_estimate_is_higher_than_the_models_context(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis, context: int, highest: int,
    known: bool,
) -> None:  # fmt: skip
    if known:  # an absurd mean of the queue instead of the size
        submit_batch(store, 1, batch_id="first", tenant="z")
        report(worker, worker.pop(1), 2**40, 0)
    began = score(redis_client, "z")
    submit_batch(store, bodies=[chat("word " * 80_000)], batch_id="b", tenant="a")
    worker.pop(1, context=context)
    assert score(redis_client, "a") - began == (2**20 if known and not context else highest)


def test_one_absurd_report_does_not_spoil_the_estimates(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis
) -> None:
    submit_batch(store, 100, batch_id="b", tenant="a")
    submit_batch(store, 100, batch_id="other", tenant="z")
    (lease,) = worker.pop(1)
    report(worker, [lease], 2**40, 2**40)
    assert score(redis_client, "a") <= 2**20
    served = by_batch(worker.pop(64))
    report(worker, served["other"], 7, 3)
    assert score(redis_client, "z") <= 2**20


@pytest.mark.parametrize(("before", "meanwhile"), [(1, 0.01), (1000, 0.001), (0.01, 1)])
def test_a_weight_that_changes_while_requests_run_gives_no_credit(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis, before: float, meanwhile: float
) -> None:
    store.set_tenant(Tenant("a", before))
    for name in ("a", "b"):
        submit_batch(store, bodies=[chat("word " * 800)] * 200, batch_id=name, tenant=name)
    leases = by_batch(worker.pop(64))
    store.set_tenant(Tenant("a", meanwhile))
    report(worker, leases["a"], 90, 10)
    assert score(redis_client, "a") == pytest.approx(100 * len(leases["a"]) / before)
    assert not {lease.id.encode() for lease in leases["a"]} & set(
        redis_client.hkeys(keys.SEQUENCES)
    )
    assert redis_client.hget(f"warmq:turns:{QUEUE}", "in_flight:a") is None


def test_a_newcomer_does_not_wait_for_many_cheap_requests_of_who_was_charged_much(
    store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 1, batch_id="dear", tenant="a")
    report(worker, worker.pop(1), 90_000, 10_000)  # so much is the queue's mean
    submit_batch(store, 3000, batch_id="a", tenant="a")
    first = worker.pop(64)
    submit_batch(store, 64, batch_id="b", tenant="b")
    end(worker, first, "failed", keep=False)  # their author must change them: 16 tokens each
    served: Counter[str] = Counter()
    while not served["b"]:
        (lease,) = worker.pop(1)
        served.update(batches_of([lease]))
        end(worker, [lease], "failed", keep=False)
        assert served["a"] <= 64


def test_what_is_given_back_is_what_was_charged_to_the_token(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis
) -> None:
    submit_batch(store, 2, batch_id="first", tenant="z")
    report_each(worker, worker.pop(2), [10, 11])  # the queue's mean is no whole number
    began = score(redis_client, "z")
    submit_batch(store, 40, batch_id="a", tenant="a")
    submit_batch(store, 40, batch_id="other", tenant="y")
    leases = by_batch(worker.pop(32))["a"]
    report(worker, leases, 17, 0)
    assert score(redis_client, "a") == began + 17 * len(leases)


def test_refunds_and_charges_that_cancel_out_in_tokens_are_made_by_their_weights(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis
) -> None:
    submit_batch(store, 1, batch_id="first", tenant="z")
    report(worker, worker.pop(1), 100, 0)
    began = score(redis_client, "z")
    submit_batch(store, 40, batch_id="a", tenant="a")
    submit_batch(store, 40, batch_id="other", tenant="y")
    leases = []
    for weight in (1, 4):
        store.set_tenant(Tenant("a", weight))
        leases += worker.pop(1)
    assert batches_of(leases) == ["a", "a"]
    report_each(worker, leases, [40, 160])
    assert score(redis_client, "a") - began == pytest.approx(40 / 1 + 160 / 4)


# -- nobody waits while messages without a use are removed; a deleted batch leaves none -----------


MANY = 5000


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
