"""The check that finds what is left behind in Redis finds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis
from kit.protocol import script_keys
from kit.protocol.lessee import Lessee, celery_message, submit_batch
from kit.protocol.snapshot import lease_record, letter_record
from kit.verdicts.owners import ownerless

from contract.redis import keys
from contract.redis.batches import BatchStore


def test_a_batch_at_work_owns_what_it_has(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 6)
    done, failed, returned, *_ = worker.pop(4)
    worker.done(done)
    worker.done(failed, outcome="failed", keep=True)
    worker.release(returned, died=[returned])
    assert ownerless(redis_client) == {}


def leave_result(client: redis.Redis) -> None:
    client.set(keys.result_key("r1"), "{}")


def leave_kept_message(client: redis.Redis) -> None:
    client.hset(keys.batch_key("gone", "failed"), "r1", b"warmq\0{}")


def leave_count(client: redis.Redis) -> None:
    client.hset(keys.RETURNS, "r1", 1)


def leave_lease(client: redis.Redis) -> None:
    client.zadd(keys.LEASES, {"w9/1": 1})


def leave_record(client: redis.Redis) -> None:
    client.hset(script_keys.worker_key("w9"), "w9/1", lease_record("r1"))


def leave_leased_message(client: redis.Redis) -> None:
    client.lpush(script_keys.leased_key("w9/1"), celery_message("r1"))


def leave_dead_message(client: redis.Redis) -> None:
    client.lpush(keys.dead_key("1"), celery_message("r1"))


def leave_letter(client: redis.Redis) -> None:
    client.hset(keys.DEAD, "1", letter_record("r1", batch="gone"))


def leave_revocation(client: redis.Redis) -> None:
    client.zadd(keys.REVOKED, {"r1": 1})


def leave_batch_id(client: redis.Redis) -> None:
    client.zadd(keys.BATCHES, {"gone": 1})


@pytest.mark.parametrize("leave", [
    leave_result, leave_kept_message, leave_count, leave_lease, leave_record, leave_leased_message,
    leave_dead_message, leave_letter, leave_revocation, leave_batch_id,
])  # fmt: skip
def test_what_nobody_owns_is_found(
    redis_client: redis.Redis, store: BatchStore, leave: Callable[[redis.Redis], None]
) -> None:
    submit_batch(store)
    leave(redis_client)
    assert len(ownerless(redis_client)) == 1


def test_a_finished_batch_that_will_not_be_retired_owns_nothing(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 2)
    worker.done(*worker.pop())
    assert ownerless(redis_client) == {}
    redis_client.zrem(keys.RETIRING, "b1")
    assert len(ownerless(redis_client)) == 5  # the batch, its index and order, two results
    for key in redis_client.scan_iter("*b1*"):
        redis_client.pexpire(key, 60_000)
    assert len(ownerless(redis_client)) == 2
