"""Which batch a thread of the batch runner takes next."""

from __future__ import annotations

from contract.redis.due import Claim
from contract.redis.objects import Stored
from gateway.batches.runner.waiting_batches import (
    LATEST_MS,
    MOST_WAITING,
    SOONEST_MS,
    WaitingBatch,
    WaitingBatches,
)
from gateway.redis.leases import Lease


def waiting(tenant: str, name: str = "batch_1") -> WaitingBatch:
    return WaitingBatch(tenant, Lease(Claim("batch", name, "1"), 60), Stored(name, b"{}", 1))


def tenant_of(work: WaitingBatch | None) -> str:
    return work.tenant if work is not None else ""


def test_tenants_take_turns_whoever_has_more_batches() -> None:
    turns = WaitingBatches(2)
    for number in range(MOST_WAITING):
        turns.add(waiting("a", f"a{number}"))
    turns.add(waiting("b", "b0"))
    turns.add(waiting("c", "c0"))
    taken = []
    for _ in range(5):
        work = turns.take()
        assert work is not None
        taken.append(work.lease.claim.id)
        turns.done(work)
    assert taken == ["a0", "b0", "c0", "a1", "a2"]


def test_a_tenant_has_half_of_the_threads_and_never_the_last_one() -> None:
    turns = WaitingBatches(4)
    for number in range(5):
        turns.add(waiting("a", f"a{number}"))
    first, second = turns.take(), turns.take()
    assert first is not None
    assert second is not None
    assert turns.take() is None, "two of four"
    assert turns.crowded()
    turns.add(waiting("b", "b0"))
    turns.add(waiting("b", "b1"))
    assert tenant_of(turns.take()) == "b"
    assert turns.take() is None, "the last one is for a tenant that has none"
    turns.add(waiting("c", "c0"))
    assert tenant_of(turns.take()) == "c"
    assert turns.take() is None
    turns.done(first)
    assert turns.take() is None, "a and b have one each, and one thread is free"
    turns.done(second)
    assert turns.take() is not None


def test_one_thread_serves_everybody() -> None:
    turns = WaitingBatches(1)
    turns.add(waiting("a"))
    work = turns.take()
    assert work is not None
    turns.add(waiting("b"))
    assert turns.take() is None
    turns.done(work)
    assert turns.take() is not None


def test_what_has_no_room_is_looked_at_later_each_a_bit_after_the_other() -> None:
    turns = WaitingBatches(4)
    for _ in range(MOST_WAITING):
        assert turns.accepts("a")
        turns.add(waiting("a"))
    assert not turns.accepts("a")
    assert turns.accepts("b")
    later = [turns.again_ms("a") for _ in range(1500)]
    assert later[0] in range(SOONEST_MS - 1, SOONEST_MS + 1)
    assert later[0] < later[200] < later[500] <= LATEST_MS
    assert later[-1] == LATEST_MS
    assert turns.again_ms("b") <= SOONEST_MS


def test_a_closed_batch_runner_takes_nothing_more() -> None:
    turns = WaitingBatches(2)
    turns.add(waiting("a"))
    turns.add(waiting("b"))
    assert {work.tenant for work in turns.close()} == {"a", "b"}
    assert turns.take() is None
    assert not turns.accepts("a")
