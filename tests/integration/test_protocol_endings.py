"""DONE, BURY, RELEASE, RENEW and SWEEP against their own holes."""

from __future__ import annotations

import pytest
import redis
from lessee import (
    QUEUE,
    Lease,
    Lessee,
    Submitted,
    celery_message,
    queued_ids,
    stored,
    submit_batch,
)

from contract import keys
from contract.batch import Batch
from contract.store import BatchStore

SUSPECTS = keys.suspects_list(QUEUE)


@pytest.fixture
def worker(redis_client: redis.Redis) -> Lessee:
    return Lessee(redis_client, "w1")


@pytest.fixture
def other(redis_client: redis.Redis) -> Lessee:
    return Lessee(redis_client, "w2")


def now(store: BatchStore, submitted: Submitted) -> Batch:
    """Return the batch as it is now."""
    batch = store.batch(submitted.id)
    assert batch is not None
    return batch


def counts(batch: Batch) -> dict[str, int]:
    """Return the counters that are not zero."""
    names = ("completed", "failed", "cancelled", "expired")
    return {name: batch.number(name) for name in names if batch.number(name)}


# -- DONE ---------------------------------------------------------------------


def test_done_twice_counts_and_publishes_once(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    (lease,) = worker.pop()
    with redis_client.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe(keys.result_key(submitted.ids[0]))
        assert worker.done(lease) == 1
        assert worker.done(lease) == 0
        redis_client.publish(keys.result_key(submitted.ids[0]), "end")
        heard = []
        while not heard or heard[-1] != b"end":
            message = listener.get_message(timeout=5)
            heard += [message["data"]] if message else []
    assert len(heard) == 2
    batch = now(store, submitted)
    assert counts(batch) == {"completed": 1}
    assert batch.number("prompt_tokens") == 2
    assert batch.number("completion_tokens") == 3
    assert store.finished_ids(submitted.id, 0, 10) == submitted.ids


def test_done_before_seal_leaves_the_batch_open_and_seal_completes_it(
    worker: Lessee, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2, seal=False)
    worker.done(*worker.pop())
    batch = now(store, submitted)
    assert (batch.status, batch.finished) == ("validating", False)
    assert store.seal(batch, submitted.end).answer == "ok"
    assert now(store, submitted).status == "completed"


def test_a_stale_holder_may_still_commit_its_success(
    worker: Lessee, other: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    (stale,) = worker.pop()
    other.expire_leases(stale)
    assert other.sweep() == 1
    (fresh,) = other.pop()
    assert worker.done(stale) == 1
    assert other.done(fresh) == 0
    meta = stored(redis_client, submitted.ids[0])
    assert meta is not None
    assert meta["result"] == {"by": "w1"}
    assert counts(now(store, submitted)) == {"completed": 1}
    assert redis_client.zcard(keys.LEASES) == 0


@pytest.mark.parametrize("outcome", ["failed", "cancelled", "expired"])
def test_a_stale_holder_may_commit_no_other_ending(
    worker: Lessee, other: Lessee, redis_client: redis.Redis, store: BatchStore, outcome: str
) -> None:
    submitted = submit_batch(store, 1)
    (stale,) = worker.pop()
    other.expire_leases(stale)
    other.sweep()
    (fresh,) = other.pop()
    assert worker.done(stale, outcome=outcome, keep=True) == 0
    assert stored(redis_client, submitted.ids[0]) is None
    assert redis_client.hlen(keys.batch_key("b1", "failed")) == 0
    assert redis_client.hget(keys.DEATHS, submitted.ids[0]) == b"1"
    assert other.done(fresh) == 1
    assert counts(now(store, submitted)) == {"completed": 1}


def test_a_failure_that_may_be_retried_keeps_its_message(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2)
    first, second = worker.pop()
    worker.done(first, outcome="failed", keep=True)
    worker.done(second, outcome="failed", keep=False)
    kept = redis_client.hgetall(keys.batch_key("b1", "failed"))
    assert list(kept) == [submitted.ids[0].encode()]
    assert kept[submitted.ids[0].encode()].endswith(first.message)


def test_a_batchless_result_lives_for_its_ttl_and_a_batch_result_does_not_expire(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2)
    redis_client.lpush(QUEUE, celery_message("plain"))
    plain, first, _ = worker.pop()
    worker.done(plain, first)
    assert 0 < redis_client.pttl(keys.result_key("plain")) <= 60_000
    assert redis_client.pttl(keys.result_key(submitted.ids[0])) == -1


def test_a_result_that_is_not_wanted_drops_lease_and_counts(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, celery_message("plain"))
    worker.release(*worker.pop())
    (lease,) = worker.pop()
    assert lease.returns == 1
    worker.done(lease, outcome="ignored")
    assert stored(redis_client, "plain") is None
    assert redis_client.zcard(keys.LEASES) == 0
    assert redis_client.hlen(keys.RETURNS) == 0


def test_a_success_that_comes_after_cancel_can_be_retried(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    """The engine was done before the abort reached it; the message must not be lost."""
    submitted = submit_batch(store, 1)
    (lease,) = worker.pop()
    store.cancel_request(submitted.batch, "c1")
    assert worker.done(lease) == 0
    assert store.retry(submitted.batch, ["cancelled"]) == 1
    (again,) = worker.pop()
    assert again.request_id == submitted.ids[0]
    worker.done(again)
    assert counts(now(store, submitted)) == {"completed": 1}
    assert now(store, submitted).finished


# -- BURY ---------------------------------------------------------------------


def test_bury_moves_the_message_to_the_dead_letters_and_answers_for_it(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    (lease,) = worker.pop()
    assert worker.bury(lease, 'unreadable: "quotes" and \x01') == 1
    assert worker.bury(lease, "again") == 0
    (letter,) = store.dead_letters()
    assert letter["message"] == lease.message
    assert counts(now(store, submitted)) == {"failed": 1}
    assert now(store, submitted).finished
    assert redis_client.zcard(keys.LEASES) == 0


# -- RELEASE --------------------------------------------------------------------


def test_release_puts_messages_at_the_head_of_their_own_lists_in_their_old_order(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    high, low = keys.priority_list(QUEUE, 3), keys.priority_list(QUEUE, 9)
    redis_client.lpush(high, *(celery_message(f"h{n}") for n in range(3)))
    redis_client.lpush(low, *(celery_message(f"l{n}") for n in range(4)))
    taken = worker.pop(5)
    redis_client.lpush(high, celery_message("newer"))
    assert worker.release(*taken) == 5
    assert queued_ids(redis_client, high) == ["h0", "h1", "h2", "newer"]
    assert queued_ids(redis_client, low) == ["l0", "l1", "l2", "l3"]
    assert redis_client.zcard(keys.LEASES) == 0
    assert redis_client.hlen(keys.worker_key("w1")) == 0


def test_release_twice_puts_nothing_back_twice(worker: Lessee, redis_client: redis.Redis) -> None:
    redis_client.lpush(QUEUE, celery_message("a"))
    taken = worker.pop()
    assert worker.release(*taken) == 1
    assert worker.release(*taken) == 0
    assert queued_ids(redis_client, QUEUE) == ["a"]


def test_release_after_done_brings_nothing_back(worker: Lessee, redis_client: redis.Redis) -> None:
    redis_client.lpush(QUEUE, celery_message("a"))
    taken = worker.pop()
    worker.done(*taken)
    assert worker.release(*taken) == 0
    assert redis_client.llen(QUEUE) == 0


def test_a_lease_that_cannot_be_handed_back_is_not_lost(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, celery_message("a"))
    taken = worker.pop()
    redis_client.set(QUEUE, "not a list")
    with pytest.raises(redis.ResponseError):
        worker.release(*taken)
    assert redis_client.zcard(keys.LEASES) == 1
    redis_client.delete(QUEUE)
    assert worker.release(*taken) == 1
    assert queued_ids(redis_client, QUEUE) == ["a"]


def test_a_graceful_release_counts_a_return_but_no_death(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, celery_message("a"))
    for expected in range(4):
        (lease,) = worker.pop()
        assert (lease.returns, lease.deaths) == (expected, 0)
        worker.release(lease)
    assert redis_client.llen(SUSPECTS) == 0


# -- RENEW ----------------------------------------------------------------------


def test_renew_prolongs_what_it_names_and_tells_what_is_lost(
    worker: Lessee, other: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, celery_message("a"), celery_message("b"))
    kept, lost = worker.pop(lease_ms=5_000)
    other.expire_leases(lost)
    assert other.sweep() == 1
    before = redis_client.zscore(keys.LEASES, kept.id)
    assert worker.renew(kept.id, lost.id) == ([lost.id], [])
    after = redis_client.zscore(keys.LEASES, kept.id)
    assert after > before + 50_000
    assert worker.renew("w1/999999") == (["w1/999999"], [kept.id])
    assert redis_client.zcard(keys.LEASES) == 1


# -- SWEEP ----------------------------------------------------------------------


def test_sweep_waits_one_lease_after_a_gap(worker: Lessee, redis_client: redis.Redis) -> None:
    redis_client.lpush(QUEUE, celery_message("a"))
    (lease,) = worker.pop()
    redis_client.zadd(keys.LEASES, {lease.id: 1})
    assert worker.sweep() == -1  # nobody swept before
    assert worker.sweep() == -1  # still holding
    worker.allow_sweep()
    assert worker.sweep() == 1
    seconds, _ = redis_client.time()
    redis_client.hset(keys.SWEEP, "last", (seconds - 21) * 1000)  # more than a third of 60 s
    assert worker.sweep() == -1
    redis_client.hset(keys.SWEEP, "last", (seconds - 5) * 1000)
    redis_client.hset(keys.SWEEP, "hold", 0)
    assert worker.sweep() == 0


def test_sweep_takes_only_expired_leases(worker: Lessee, redis_client: redis.Redis) -> None:
    redis_client.lpush(QUEUE, celery_message("a"), celery_message("b"))
    first, second = worker.pop()
    worker.expire_leases(second)
    assert worker.sweep() == 1
    assert queued_ids(redis_client, QUEUE) == ["b"]
    assert redis_client.zscore(keys.LEASES, first.id) is not None


def test_sweep_restores_the_order_across_limits(
    worker: Lessee, other: Lessee, redis_client: redis.Redis
) -> None:
    ids = [f"r{n}" for n in range(25)]
    redis_client.lpush(QUEUE, *(celery_message(rid) for rid in ids))
    other.expire_leases(*worker.pop())
    while other.sweep(limit=10) > 0:
        other.allow_sweep()
    assert queued_ids(redis_client, QUEUE) == ids


def deaths(client: redis.Redis) -> dict[str, int]:
    return {rid.decode(): int(count) for rid, count in client.hgetall(keys.DEATHS).items()}


def test_only_what_can_have_been_inside_the_engine_counts_a_death(
    worker: Lessee, other: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, *(celery_message(f"r{n}") for n in range(10)))
    taken = worker.pop(slots=4)
    other.expire_leases(*taken)
    assert other.sweep() == 10
    assert deaths(redis_client) == {f"r{n}": 1 for n in range(4)}


def test_look_ahead_that_expires_later_counts_no_death(
    worker: Lessee, other: Lessee, redis_client: redis.Redis
) -> None:
    """Leases of one worker end at different times: the rank is among all of them."""
    redis_client.lpush(QUEUE, *(celery_message(f"r{n}") for n in range(8)))
    taken = worker.pop(slots=4)
    other.expire_leases(*taken[:4])
    assert other.sweep() == 4
    other.expire_leases(*taken[4:])
    assert other.sweep() == 4
    assert deaths(redis_client) == {f"r{n}": 1 for n in range(4)}


def test_the_sweeps_limit_counts_no_further_deaths(
    worker: Lessee, other: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, *(celery_message(f"r{n}") for n in range(25)))
    other.expire_leases(*worker.pop(slots=4))
    while other.sweep(limit=10) > 0:
        other.allow_sweep()
    assert deaths(redis_client) == {f"r{n}": 1 for n in range(4)}


def test_sweep_announces_the_worker_and_forgets_silent_ones(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    redis_client.hset(keys.WORKERS, "long gone", b'1000\0{"queue":"warmq"}')
    worker.sweep()
    assert [found["id"] for found in store.workers(QUEUE)] == ["w1"]
    assert redis_client.hkeys(keys.WORKERS) == [b"w1"]
    assert store.workers("another") == []


# -- suspects ---------------------------------------------------------------------


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
    assert store.dead_letters() == []
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
    assert counts(now(store, submitted)) == {"completed": 30, "failed": 2}
    assert now(store, submitted).finished
    assert len(store.dead_letters()) == 2


def test_a_poison_in_a_worker_that_is_killed_is_found_by_sweep(
    worker: Lessee, other: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    redis_client.lpush(QUEUE, celery_message("bad"))
    for lists in ([], [], [SUSPECTS], [SUSPECTS]):
        taken: list[Lease] = worker.pop(lists=lists)
        assert [lease.request_id for lease in taken] == ["bad"]
        other.expire_leases(*taken)
        assert other.sweep() == 1
    assert len(store.dead_letters()) == 1
    assert stored(redis_client, "bad")
    assert redis_client.llen(SUSPECTS) == 0


def test_a_poison_whose_result_nobody_wants_gets_none(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    redis_client.lpush(QUEUE, celery_message("bad", ignore_result=True))
    make_suspects(worker)
    assert run_suspects(worker, {"bad"}) == (2, [])
    assert stored(redis_client, "bad") is None
    assert len(store.dead_letters()) == 1
