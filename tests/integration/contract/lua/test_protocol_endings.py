"""DONE, BURY, RELEASE, RENEW and SWEEP against their own holes."""

from __future__ import annotations

import pytest
import redis
from kit.protocol import script_keys
from kit.protocol.lessee import (
    QUEUE,
    Lessee,
    celery_message,
    counts,
    dead_messages,
    now,
    queued_ids,
    stored,
    submit_batch,
)

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore

SUSPECTS = keys.suspects_list(QUEUE)


# -- DONE ------------------------------------------------------------------------------------


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
    batch = now(store, submitted.id)
    assert counts(batch) == {"completed": 1}
    assert batch.number("prompt_tokens") == 2
    assert batch.number("completion_tokens") == 3
    assert store.finished_ids(submitted.id, 0, 10) == submitted.ids


def test_done_before_seal_leaves_the_batch_open_and_seal_completes_it(
    worker: Lessee, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2, seal=False)
    worker.done(*worker.pop())
    batch = now(store, submitted.id)
    assert (batch.status, batch.finished) == ("validating", False)
    assert store.seal(batch, submitted.end).answer == "ok"
    assert now(store, submitted.id).status == "completed"


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
    assert counts(now(store, submitted.id)) == {"completed": 1}
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
    assert counts(now(store, submitted.id)) == {"completed": 1}


def test_a_failure_that_may_be_retried_keeps_its_message(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2)
    first, second = worker.pop()
    worker.done(first, outcome="failed", keep=True)
    worker.done(second, outcome="failed", keep=False)
    kept = redis_client.hgetall(keys.batch_key("b1", "failed"))
    assert list(kept) == [submitted.ids[0].encode()]
    kept_key = script_keys.kept_key("b1", submitted.ids[0])
    assert redis_client.lrange(kept_key, 0, -1) == [first.message]
    assert not redis_client.exists(script_keys.kept_key("b1", submitted.ids[1]))


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
    assert counts(now(store, submitted.id)) == {"completed": 1}
    assert now(store, submitted.id).finished


# -- BURY ------------------------------------------------------------------------------------


def test_bury_moves_the_message_to_the_dead_letters_and_answers_for_it(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    (lease,) = worker.pop()
    assert worker.bury(lease, 'unreadable: "quotes" and \x01') == 1
    assert worker.bury(lease, "again") == 0
    assert dead_messages(store) == [lease.message]
    assert counts(now(store, submitted.id)) == {"failed": 1}
    assert now(store, submitted.id).finished
    assert redis_client.zcard(keys.LEASES) == 0


# -- RELEASE ---------------------------------------------------------------------------------


def test_release_puts_messages_at_the_head_of_their_own_lists_in_their_old_order(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    high, low = naming.priority_list(QUEUE, 3), naming.priority_list(QUEUE, 9)
    redis_client.lpush(high, *(celery_message(f"h{n}") for n in range(3)))
    redis_client.lpush(low, *(celery_message(f"l{n}") for n in range(4)))
    taken = worker.pop(5)
    redis_client.lpush(high, celery_message("newer"))
    assert worker.release(*taken) == 5
    assert queued_ids(redis_client, high) == ["h0", "h1", "h2", "newer"]
    assert queued_ids(redis_client, low) == ["l0", "l1", "l2", "l3"]
    assert redis_client.zcard(keys.LEASES) == 0
    assert redis_client.hlen(script_keys.worker_key("w1")) == 0


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
    worker: Lessee, other: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, celery_message("a"))
    taken = worker.pop()
    redis_client.set(QUEUE, "not a list")
    worker.release(*taken)
    assert redis_client.zcard(keys.LEASES) == 1
    redis_client.delete(QUEUE)
    worker.allow_sweep()
    other.sweep()
    assert redis_client.zcard(keys.LEASES) == 0
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


# -- RENEW -----------------------------------------------------------------------------------


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


# -- SWEEP -----------------------------------------------------------------------------------


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
    taken = worker.pop(slots=4, lease_ms=20_000)  # the worker was not heard of for 40 s
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
