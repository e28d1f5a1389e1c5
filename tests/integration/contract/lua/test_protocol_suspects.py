"""Suspects: halved until the culprit is alone, and handed back as the group they ran in."""

from __future__ import annotations

import pytest
import redis
from kit.protocol.lessee import (
    QUEUE,
    Lease,
    Lessee,
    celery_message,
    counts,
    now,
    queued_ids,
    stored,
    submit_batch,
)

from contract.redis import keys
from contract.redis.batches import BatchStore

SUSPECTS = keys.suspects_list(QUEUE)


def run_suspects(worker: Lessee, poison: set[str], slots: int = 64) -> tuple[int, list[str]]:
    """Run the suspects as the drain does; return (deaths, completed ids)."""
    died, completed = 0, []
    worker.pop(0)
    while (waiting := worker.head[1]) > 0:
        group = int(worker.head[2]) or -(-waiting // 2)
        leases = worker.pop(min(group, slots), lists=[SUSPECTS])
        if poison & {lease.request_id for lease in leases}:
            died += 1
            worker.release(*leases, died=leases)
        else:
            worker.done(*leases)
            completed += [lease.request_id for lease in leases]
        assert died < 100
        worker.pop(0)
    return died, completed


def make_suspects(worker: Lessee, max_deaths: int = 2) -> None:
    """Let the engine die with everything in it, until all of it is suspect."""
    for _ in range(max_deaths):
        leases = worker.pop()
        worker.release(*leases, died=leases, max_deaths=max_deaths)


def test_a_second_death_makes_suspects_and_the_rest_of_the_queue_goes_on(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, celery_message("a"), celery_message("b"))
    make_suspects(worker)
    assert queued_ids(redis_client, SUSPECTS) == ["a", "b"]
    redis_client.lpush(QUEUE, celery_message("c"))
    assert [lease.request_id for lease in worker.pop()] == ["c"]
    assert worker.head[1] == 2


@pytest.mark.parametrize("culprit", ["r0", "r1", "r31", "r63"])
def test_halving_finds_one_poison_among_64_with_few_deaths(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore, culprit: str
) -> None:
    redis_client.lpush(QUEUE, *(celery_message(f"r{n}") for n in range(64)))
    make_suspects(worker)
    died, completed = run_suspects(worker, {culprit})
    assert died <= 8
    assert sorted(completed) == sorted({f"r{n}" for n in range(64)} - {culprit})
    (letter,) = store.dead_letters()
    assert letter["reason"].startswith("poison")
    meta = stored(redis_client, culprit)
    assert meta is not None
    assert meta["warmq"]["error"]["code"] == "poison"
    assert redis_client.hlen(keys.DEATHS) == 0
    assert redis_client.hlen(keys.RETURNS) == 0


def test_one_death_alone_is_not_enough_to_be_blamed(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    """Somebody else may have killed the engine just then."""
    redis_client.lpush(QUEUE, celery_message("innocent"))
    make_suspects(worker)
    (once,) = worker.pop(lists=[SUSPECTS])
    worker.release(once, died=[once])
    assert not list(store.dead_letters())
    (again,) = worker.pop(lists=[SUSPECTS])
    assert worker.done(again) == 1
    assert redis_client.hlen(keys.DEATHS) == 0


def test_two_poisons_are_both_found(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 32)
    make_suspects(worker)
    died, completed = run_suspects(worker, {submitted.ids[3], submitted.ids[29]})
    assert died <= 16
    assert len(completed) == 30
    assert counts(now(store, submitted.id)) == {"completed": 30, "failed": 2}
    assert now(store, submitted.id).finished
    assert len(list(store.dead_letters())) == 2


def test_a_poison_in_a_worker_that_is_killed_is_found_by_sweep(
    worker: Lessee, other: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    redis_client.lpush(QUEUE, celery_message("bad"))
    for lists in ([], [], [SUSPECTS], [SUSPECTS]):
        taken: list[Lease] = worker.pop(lists=lists)
        assert [lease.request_id for lease in taken] == ["bad"]
        other.expire_leases(*taken)
        assert other.sweep() == 1
    assert len(list(store.dead_letters())) == 1
    assert stored(redis_client, "bad")
    assert redis_client.llen(SUSPECTS) == 0


def test_a_poison_whose_result_nobody_wants_gets_none(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    redis_client.lpush(QUEUE, celery_message("bad", ignore_result=True))
    make_suspects(worker)
    assert run_suspects(worker, {"bad"}) == (2, [])
    assert stored(redis_client, "bad") is None
    assert len(list(store.dead_letters())) == 1


def test_a_group_larger_than_one_sweep_takes_is_swept_as_one(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 5)
    lessee = Lessee(redis_client)
    # Given five suspects, in the engine of a worker that dies
    for _ in range(2):
        leases = lessee.pop()
        lessee.release(*leases, died=leases)
    assert redis_client.llen(SUSPECTS) == 5
    group = Lessee(redis_client, "w2").pop(lists=[SUSPECTS])
    assert len(group) == 5
    # When sweeps have room for four of them
    lessee.expire_leases(*group)
    lessee.sweep(limit=4)
    lessee.sweep(limit=4)
    # Then none of them was alone: the group is halved and nobody is the culprit
    assert redis_client.hlen(keys.DEAD) == 0
    assert redis_client.llen(SUSPECTS) == 5
    assert redis_client.get(f"{SUSPECTS}:group") == b"3"
    assert redis_client.hget(keys.RETURNS, submitted.ids[0]) == b"3"
