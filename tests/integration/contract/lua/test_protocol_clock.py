"""A Redis whose clock steps: nobody waits for the step to pass, nobody living is robbed."""

from __future__ import annotations

import pytest
import redis
from kit.protocol.lessee import QUEUE, Lessee, celery_message, queued_ids

from contract.redis import keys

LEASE_MS = 6_000


def step(client: redis.Redis, by_ms: int, *workers: Lessee) -> None:
    """Make all that Redis has noted look as if its clock had since moved by so much."""
    for lease, expiry in client.zrange(keys.LEASES, 0, -1, withscores=True):
        client.zadd(keys.LEASES, {lease: expiry - by_ms})
    for name, at in client.hgetall(keys.SWEEP).items():
        client.hset(keys.SWEEP, name, int(at) - by_ms)


def lease_left_ms(client: redis.Redis, lease: str) -> float:
    seconds, micros = client.time()
    score = client.zscore(keys.LEASES, lease)
    assert score is not None
    return score - (seconds * 1000 + micros / 1000)


@pytest.mark.parametrize("back_s", [600, 7])
def test_a_clock_that_steps_back_delays_recovery_by_one_lease_at_most(
    worker: Lessee, other: Lessee, redis_client: redis.Redis, back_s: int
) -> None:
    redis_client.lpush(QUEUE, celery_message("a"))
    (lease,) = worker.pop(lease_ms=LEASE_MS)
    other.allow_sweep()
    assert other.sweep(lease_ms=LEASE_MS) == 0
    step(redis_client, -back_s * 1000)
    # The dead worker's lease has what it had left, not the step besides
    assert other.sweep(lease_ms=LEASE_MS) == -1
    assert lease_left_ms(redis_client, lease.id) <= LEASE_MS
    hold = int(redis_client.hget(keys.SWEEP, "hold"))
    seconds, micros = redis_client.time()
    assert hold <= seconds * 1000 + micros / 1000 + LEASE_MS
    # And when that has passed it is swept
    redis_client.hset(keys.SWEEP, "hold", 0)
    other.expire_leases(lease)
    assert other.sweep(lease_ms=LEASE_MS) == 1
    assert queued_ids(redis_client, QUEUE) == ["a"]


def test_a_lease_that_had_ended_before_a_clock_stepped_back_has_ended_after_it_too(
    worker: Lessee, other: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, celery_message("a"))
    (lease,) = worker.pop(lease_ms=LEASE_MS)
    # Given a dead worker's lease that ended while the sweepers held back
    assert other.sweep(lease_ms=LEASE_MS) == -1
    seconds, _ = redis_client.time()
    redis_client.zadd(keys.LEASES, {lease.id: (seconds - 1) * 1000})
    step(redis_client, -600_000)
    other.sweep(lease_ms=LEASE_MS)
    assert lease_left_ms(redis_client, lease.id) <= 0


def test_a_clock_that_steps_back_robs_no_worker_that_renewed_since(
    worker: Lessee, other: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, celery_message("a"))
    (lease,) = worker.pop(lease_ms=LEASE_MS)
    other.allow_sweep()
    other.sweep(lease_ms=LEASE_MS)
    step(redis_client, -600_000)
    worker.renew(lease.id, lease_ms=LEASE_MS)
    other.sweep(lease_ms=LEASE_MS)
    assert lease_left_ms(redis_client, lease.id) > LEASE_MS / 2


def test_a_clock_that_steps_forward_lets_living_workers_renew_first(
    worker: Lessee, other: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, celery_message("a"))
    (lease,) = worker.pop(lease_ms=LEASE_MS)
    other.allow_sweep()
    other.sweep(lease_ms=LEASE_MS)
    step(redis_client, 600_000)
    assert other.sweep(lease_ms=LEASE_MS) == -1
    assert worker.renew(lease.id, lease_ms=LEASE_MS) == ([], [])
    redis_client.hset(keys.SWEEP, "hold", 0)
    assert other.sweep(lease_ms=LEASE_MS) == 0


def test_the_lock_of_a_dead_holder_ends_within_a_lease_of_a_clock_that_stepped_back(
    worker: Lessee, other: Lessee, redis_client: redis.Redis
) -> None:
    suspects = keys.suspects_list(QUEUE)
    assert worker.run("suspects_lock", suspects, "w1", LEASE_MS) == 1
    redis_client.pexpire(f"{suspects}:lock", 600_000 + LEASE_MS)  # the step
    assert other.run("suspects_lock", suspects, "w2", LEASE_MS) == 0
    assert redis_client.pttl(f"{suspects}:lock") <= LEASE_MS


def test_announcements_from_the_future_are_forgotten(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    seconds, _ = redis_client.time()
    redis_client.hset(keys.WORKERS, "dead", b'%d\0{"queue":"warmq"}' % ((seconds + 600) * 1000))
    worker.sweep()
    assert redis_client.hkeys(keys.WORKERS) == [b"w1"]
