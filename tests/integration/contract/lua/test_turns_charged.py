"""What a request costs its tenant, however it ends: nobody is served more often for failing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import redis
from kit.protocol.lessee import Lease, Lessee, chat, submit_batch
from kit.protocol.turn_steps import batches_of, by_batch, end, report, score

from contract.redis.batches import BatchStore

#: How a worker ends what it does not complete: outcome, and whether its message is kept.
NOT_COMPLETED = [("failed", True), ("failed", False), ("cancelled", True), ("expired", True)]


@pytest.fixture
def worker(redis_client: redis.Redis) -> Lessee:
    """Return one worker's side of the protocol."""
    return Lessee(redis_client)


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
