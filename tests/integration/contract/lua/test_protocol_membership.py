"""Who belongs to a batch: only what ENQUEUE queued for this life of it.

The attacker of these tests may write to the queue's lists, and knows every id.
"""

from __future__ import annotations

import asyncio

import orjson
import pytest
import redis
from kit.drain.draining import draining, soon
from kit.protocol.lessee import (
    QUEUE,
    Lessee,
    celery_message,
    chat,
    counts,
    now,
    stored,
    submit_batch,
)

from contract.redis import keys
from contract.redis.batches import BatchStore
from producer.cli.show import batch_json
from worker.engine import Completion, EngineRequest
from worker.engine.simulated.engine import SimulatedEngine, digest


def forged(request_id: str, **ours: object) -> bytes:
    """Return a message that claims to be of batch b1."""
    return celery_message(request_id, warmq={"batch": "b1", "custom_id": "c9", "line": 9, **ours})


@pytest.mark.parametrize("life", [None, "", "guessed", 5])
def test_a_forged_member_of_a_batch_counts_nothing_and_ends_nothing(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore, life: object
) -> None:
    submitted = submit_batch(store, 2)
    created = submitted.batch.created
    redis_client.rpush(QUEUE, forged("f1", created=created, life=life), forged("f2", life=life))
    leases = worker.pop()
    assert [lease.request_id for lease in leases] == submitted.ids
    worker.done(*leases)
    assert (now(store).status, counts(now(store))) == ("completed", {"completed": 2})
    assert batch_json(now(store))["request_counts"]["in_progress"] == 0


def test_a_plain_request_with_the_id_of_a_batch_request_takes_no_ending_from_it(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2)
    plain = [celery_message(rid) for rid in submitted.ids]
    # One is answered before the batch's request is popped, one while it runs
    redis_client.rpush(QUEUE, plain[0])
    worker.done(*worker.pop(1))
    assert redis_client.pttl(keys.result_key(submitted.ids[0])) > 0
    first, second = worker.pop()
    redis_client.rpush(QUEUE, plain[1])
    worker.done(*worker.pop())
    worker.done(first)
    worker.done(second, outcome="failed", keep=True)
    assert now(store).finished
    assert counts(now(store)) == {"completed": 1, "failed": 1}
    assert all(redis_client.pttl(keys.result_key(rid)) == -1 for rid in submitted.ids)


def test_a_batch_with_plain_results_under_its_ids_is_cancelled_and_deleted(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 3)
    redis_client.rpush(QUEUE, *(celery_message(rid) for rid in submitted.ids[:2]))
    worker.done(*worker.pop(2))
    assert store.cancel(submitted.batch) == 3
    assert now(store).status == "cancelled"
    assert store.delete("b1")


def test_a_forced_delete_takes_a_batch_in_any_state(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2, seal=False)
    redis_client.hset(keys.batch_key("b1"), "total", 99)  # however it came to be wrong
    worker.done(*worker.pop(1))
    store.cancel(submitted.batch)
    assert now(store).status == "cancelling"
    assert store.delete("b1") is False
    assert store.delete("b1", force=True) is True
    assert worker.pop() == []
    found = {key.decode() for key in redis_client.keys("*") if redis_client.pttl(key) < 0}
    assert found == {keys.LEASE_SEQ}


def test_a_late_duplicate_of_a_finished_batch_counts_nothing(
    worker: Lessee, other: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    """Even when the result is gone: counters never pass the total."""
    submitted = submit_batch(store, 1)
    (stale,) = worker.pop()
    other.expire_leases(stale)
    other.sweep()
    (fresh,) = other.pop()
    other.done(fresh)
    redis_client.delete(keys.result_key(submitted.ids[0]))
    assert worker.done(stale) == 0
    assert counts(now(store)) == {"completed": 1}


class Waiting(SimulatedEngine):
    """Answers when it is told to; knows the prompts it was given."""

    begun: dict[str, str]
    go: asyncio.Event

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        self.begun = {**getattr(self, "begun", {}), request_id: digest(request.body)}
        self.go = getattr(self, "go", None) or asyncio.Event()
        await self.go.wait()
        return await super().generate(request, request_id)


async def test_an_answer_to_an_old_prompt_is_not_given_to_a_new_batch_of_the_same_id(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    old = submit_batch(store, bodies=[chat(f"old {n}") for n in range(4)])
    # Without side tasks: the worker never hears of the cancel
    async with draining(redis_url, Waiting, side_tasks=False, simulated_slots=8) as running:
        await soon(lambda: running.engines and len(getattr(running.engine, "begun", {})) == 4)
        store.cancel(old.batch)
        assert store.delete("b1")
        bodies = [chat(f"new {n}") for n in range(4)]
        new = submit_batch(store, bodies=bodies)
        assert new.ids == old.ids
        await soon(lambda: len(running.engine.begun) == 8)  # type: ignore[attr-defined]
        running.engine.go.set()  # type: ignore[attr-defined]
        await soon(lambda: now(store).finished)
        await soon(lambda: not running.drain.in_flight)
    for rid, body in zip(new.ids, bodies, strict=True):
        meta = stored(redis_client, rid)
        assert meta is not None
        text = meta["result"]["choices"][0]["message"]["content"]
        assert text == f"simulated {digest(body)}"
    assert counts(now(store)) == {"completed": 4}


async def test_one_task_id_with_two_prompts_runs_both_and_the_first_answer_stays(
    redis_client: redis.Redis, redis_url: str
) -> None:
    bodies = [chat("one", user="simulate:sleep=0.3"), chat("two", user="simulate:sleep=0.3")]
    redis_client.lpush(QUEUE, *(celery_message("same", body) for body in bodies))
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 2)
        meta = await soon(lambda: stored(redis_client, "same"))
        await soon(lambda: not running.drain.in_flight)
        assert stored(redis_client, "same") == meta


def test_messages_carry_the_life_of_their_batch_and_no_client_sees_it(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    (lease,) = worker.pop()
    ours = orjson.loads(lease.message)["headers"]["warmq"]
    assert ours["life"] == submitted.batch.life
    assert len(ours["life"].partition(".")[0]) == 16
    worker.done(lease, outcome="failed")
    assert submitted.batch.life not in str(stored(redis_client, submitted.ids[0]))
    assert submitted.batch.life not in str(batch_json(now(store)))
