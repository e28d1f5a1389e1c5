"""Nothing lives for ever: every key has an owner or an end, whatever was cut short."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
import redis
from kit.commands.support import batch_file, run_producer
from kit.protocol import script_keys
from kit.protocol.lessee import (
    QUEUE,
    Lessee,
    celery_message,
    counts,
    now,
    queued_ids,
    stored,
    submit_batch,
)

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from worker.drain.leases import Leases
from worker.drain.sweeper import retire_some
from worker.settings import WorkerSettings

SUSPECTS = keys.suspects_list(QUEUE)


def retire(url: str) -> None:
    async def run() -> None:
        leases = Leases(WorkerSettings(redis_url=url, engine="simulated", result_ttl_s=60), "w1")
        try:
            await retire_some(leases)
        finally:
            await leases.close()

    asyncio.run(run())


def left(client: redis.Redis) -> set[str]:
    """Return the keys that are there, but for what a queue remembers of its turns and tokens."""
    found = {key.decode() for key in client.scan_iter()}
    remembered = (naming.turns_key(QUEUE), f"warmq:used:{QUEUE}:")
    turns = {key for key in found if key.startswith(remembered)}
    assert all(client.pttl(key) > 0 for key in turns)
    return found - turns


def without_end(client: redis.Redis) -> set[str]:
    """Return the keys that have no expiry, but for the counter of leases and the sweep's notes."""
    found = {key.decode() for key in client.scan_iter() if client.pttl(key) < 0}
    return found - {keys.LEASE_SEQ, keys.SWEEP, keys.WORKERS, keys.BATCHES}


def test_what_is_kept_of_a_cancelled_batch_after_its_retirement_expires_with_it(
    worker: Lessee, redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 3)
    store.cancel(submitted.batch)
    retire(redis_url)
    assert worker.pop() == []  # meets the messages only now
    assert without_end(redis_client) == set()
    batch_ms = redis_client.pttl(keys.batch_key("b1"))
    kept_ms = redis_client.pttl(script_keys.kept_key("b1", submitted.ids[0]))
    # The script takes the one's rest for the other's whole: it ends later by as long as that took.
    assert 0 < kept_ms <= batch_ms + 1000


def test_a_retry_with_nothing_to_retry_takes_no_expiry_back(
    worker: Lessee, redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2)
    worker.done(*worker.pop())
    retire(redis_url)
    assert store.retry(submitted.batch, ["failed", "cancelled"]) == 0
    assert without_end(redis_client) == set()


def test_a_retry_killed_before_its_second_step_gets_its_expiry_anew(
    worker: Lessee, redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    worker.done(*worker.pop(), outcome="failed", keep=True)
    retire(redis_url)
    assert worker.run("hold", "b1", submitted.batch.life, *submitted.ids) == 1
    assert keys.batch_key("b1") in without_end(redis_client)
    # For a minute nobody retires it: a large retry is not overtaken
    retire(redis_url)
    assert keys.batch_key("b1") in without_end(redis_client)
    redis_client.zadd(keys.RETIRING, {"b1": 1})
    retire(redis_url)
    assert without_end(redis_client) == set()


@pytest.mark.parametrize("held_first", [0, 1, 2])
def test_a_retire_between_two_steps_of_a_hold_makes_retry_wait_for_a_whole_one(
    worker: Lessee, redis_client: redis.Redis, redis_url: str, store: BatchStore, tmp_path: Path,
    held_first: int,
) -> None:  # fmt: skip
    """A producer that was paused for more than a minute: no result expires in an open batch."""
    file = batch_file(tmp_path / "in.jsonl", 1200)
    assert run_producer("submit", file, "--batch-id", "b1", redis_url=redis_url).returncode == 0
    batch = store.batch("b1")
    assert batch is not None
    while leases := worker.pop(500):
        worker.done(*leases, outcome="failed", keep=True)
    life = batch.life
    chunks = [chunk.request_ids("b1") for chunk in store.index("b1")]
    assert len(chunks) == 3
    redis_client.hset(keys.batch_key("b1"), "retiring", 60_000)  # a RETIRE has begun
    worker.run("hold", "b1", life)
    assert worker.run("retry", "b1", life, chunks[0][0], "failed") == -2
    for ids in chunks[:held_first]:
        worker.run("hold", "b1", life, *ids)
    redis_client.zadd(keys.RETIRING, {"b1": 1})  # a minute later
    retire(redis_url)
    for ids in chunks[held_first:]:
        worker.run("hold", "b1", life, *ids)
    if held_first:
        assert worker.run("retry", "b1", life, chunks[0][0], "failed") == -2
    assert store.retry(batch, ["failed"]) == 1200
    assert not [
        name for ids in chunks for name in ids if redis_client.pttl(keys.result_key(name)) > 0
    ]
    assert not redis_client.exists(keys.batch_key("b1", "held"))
    assert redis_client.ttl(keys.batch_key("b1")) == -1


def test_a_delete_killed_half_way_is_ended_by_its_repetition(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2)
    worker.done(*worker.pop())
    assert worker.run("delete", "b1", submitted.batch.life, 0) == 1
    assert now(store).status == "deleting"  # it is there, so the command can be repeated
    assert store.delete("b1")
    assert without_end(redis_client) == set()
    assert store.batch("b1") is None


def test_a_delete_killed_half_way_is_ended_by_a_worker(
    worker: Lessee, redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2)
    first, second = worker.pop()
    worker.done(first)
    worker.done(second, outcome="failed", keep=True)
    retire(redis_url)
    worker.run("delete", "b1", submitted.batch.life, 0)
    retire(redis_url)
    assert left(redis_client) == {keys.LEASE_SEQ}


def test_dead_letters_of_a_deleted_batch_go_with_the_next_sweeps(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submit_batch(store, 1)
    worker.bury(*worker.pop(), "unreadable")
    worker.sweep()
    assert len(list(store.dead_letters())) == 1
    store.delete("b1")
    worker.sweep()
    assert not list(store.dead_letters())
    assert redis_client.keys(f"{keys.DEAD}*") == []


def test_dead_letters_of_no_batch_live_as_long_as_results(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    redis_client.lpush(QUEUE, b"garbage")
    worker.pop()
    ((letter, record),) = redis_client.hgetall(keys.DEAD).items()
    redis_client.hset(keys.DEAD, letter, b"1" + record[record.index(b"\0") :])
    worker.sweep()
    assert redis_client.keys(f"{keys.DEAD}*") == []


def test_dead_letters_are_deleted_by_name(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    redis_client.lpush(QUEUE, b"one", b"two")
    worker.pop()
    first, second = store.dead_letters()
    assert store.delete_dead([first["id"], "999"]) == 1
    assert [letter["id"] for letter in store.dead_letters()] == [second["id"]]
    assert len(redis_client.keys(f"{keys.DEAD}:*")) == 1


def test_counts_of_requests_whose_queue_was_emptied_end_by_themselves(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, celery_message("a"))
    leases = worker.pop()
    worker.release(*leases, died=leases)
    redis_client.delete(QUEUE)  # `celery purge`
    assert worker.pop() == []
    assert without_end(redis_client) == set()


def test_old_revocations_are_forgotten_by_the_sweep_and_count_no_more(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.zadd(keys.REVOKED, {"a": 1})
    redis_client.lpush(QUEUE, celery_message("a"))
    assert [lease.request_id for lease in worker.pop()] == ["a"]
    worker.sweep()
    assert not redis_client.exists(keys.REVOKED)


def test_a_request_that_celery_revoked_can_be_retried(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    worker.run("revoke", 10_800, *submitted.ids)
    assert worker.pop() == []
    assert counts(now(store)) == {"cancelled": 1}
    assert store.retry(submitted.batch, ["cancelled"]) == 1
    worker.done(*worker.pop())
    assert counts(now(store)) == {"completed": 1}


# -- dead letters in numbers -----------------------------------------------------------------


def test_many_dead_letters_are_retried_in_steps(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    redis_client.lpush(QUEUE, *(celery_message(f"r{n}") for n in range(1200)))
    while leases := worker.pop(400):
        for lease in leases:
            worker.bury(lease, "unreadable")
    redis_client.config_resetstat()
    ids = [letter["id"] for letter in store.dead_letters()]
    assert store.retry_dead(ids) == 1200
    assert (
        redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] <= 4
    )  # one is not loaded yet
    assert queued_ids(redis_client, QUEUE) == [f"r{n}" for n in range(1200)]


def test_a_message_with_an_odd_batch_name_stops_no_retry_of_dead_letters(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submit_batch(store, 1)
    worker.bury(*worker.pop(), "unreadable")
    odd = {"batch": "b1:index", "life": "x", "custom_id": "c", "line": 1}
    redis_client.lpush(QUEUE, celery_message("odd", warmq=odd), b"garbage")
    assert worker.pop() == []
    assert store.retry_dead([letter["id"] for letter in store.dead_letters()]) == 1


@pytest.mark.parametrize("priority", [0, 3, 6, 9])
def test_a_retried_suspect_comes_back_at_its_own_priority(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore, priority: int
) -> None:
    """Whether it killed the engine alone, or failed while it ran as a suspect."""
    submitted = submit_batch(store, 2, priority=priority)
    for _ in range(2):
        leases = worker.pop()
        worker.release(*leases, died=leases)
    poison, failing = worker.pop(lists=[SUSPECTS])
    worker.done(failing, outcome="failed", keep=True)
    worker.release(poison, died=[poison])
    (poison,) = worker.pop(lists=[SUSPECTS])
    worker.release(poison, died=[poison])
    assert store.retry_dead([letter["id"] for letter in store.dead_letters()]) == 1
    assert store.retry(submitted.batch, ["failed"]) == 1
    assert set(queued_ids(redis_client, submitted.list_key)) == set(submitted.ids)


def test_retry_asks_for_no_result(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 20)
    first, *rest = worker.pop()
    worker.done(*rest)
    worker.done(first, outcome="failed", keep=True)
    redis_client.config_resetstat()
    assert store.retry(submitted.batch, ["failed"]) == 1
    calls = redis_client.info("commandstats")
    assert "cmdstat_mget" not in calls
    assert stored(redis_client, submitted.ids[0]) is None


def test_large_results_are_asked_for_a_few_at_a_time(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    ids = [f"r{n}" for n in range(100)]
    for rid in ids:
        redis_client.set(keys.result_key(rid), orjson.dumps(rid) + b"x" * 500_000)
    redis_client.config_resetstat()
    for _ in range(2):
        found = store.results(ids)
        assert [orjson.loads(raw[: raw.index(b"x")]) for raw in found if raw] == ids
    assert redis_client.info("commandstats")["cmdstat_mget"]["calls"] >= 4
