"""A newcomer does not wait behind charges that prove too high, nor behind a weight of the past."""

from __future__ import annotations

from collections import Counter

import pytest
import redis
from kit.protocol.lessee import QUEUE, Lessee, chat, submit_batch
from kit.protocol.turn_steps import batches_of, by_batch, end, report, report_each, score

from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.tenants import Tenant


@pytest.fixture
def worker(redis_client: redis.Redis) -> Lessee:
    """Return one worker's side of the protocol."""
    return Lessee(redis_client)


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
    submit_batch(store, bodies=[chat("word " * 80_000)], batch_id="b", tenant="a")
    worker.pop(1, context=context)
    assert score(redis_client, "a") == (2**20 if known and not context else highest)


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
    submit_batch(store, 40, batch_id="a", tenant="a")
    submit_batch(store, 40, batch_id="other", tenant="y")
    leases = by_batch(worker.pop(32))["a"]
    report(worker, leases, 17, 0)
    assert score(redis_client, "a") == 17 * len(leases)


def test_refunds_and_charges_that_cancel_out_in_tokens_are_made_by_their_weights(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis
) -> None:
    submit_batch(store, 1, batch_id="first", tenant="z")
    report(worker, worker.pop(1), 100, 0)
    submit_batch(store, 40, batch_id="a", tenant="a")
    submit_batch(store, 40, batch_id="other", tenant="y")
    leases = []
    for weight in (1, 4):
        store.set_tenant(Tenant("a", weight))
        leases += worker.pop(1)
    assert batches_of(leases) == ["a", "a"]
    report_each(worker, leases, [40, 160])
    assert score(redis_client, "a") == pytest.approx(40 / 1 + 160 / 4)
