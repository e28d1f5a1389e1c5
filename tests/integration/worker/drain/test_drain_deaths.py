"""The drain when its engine dies, or cannot be built; suspects."""

from __future__ import annotations

import asyncio

import pytest
import redis
from kit.drain.draining import LONG, draining, error_of, leased, soon
from kit.drain.troubled import scene
from kit.protocol.lessee import (
    QUEUE,
    celery_message,
    chat,
    now,
    queued_ids,
    stored,
    submit_batch,
)

from contract.errors import EngineDead, RequestRejected
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.reads import Reads
from demo.stack import RedisServer
from worker.drain import keeper
from worker.drain.lifecycle import State
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.simulated.engine import SimulatedEngine


async def test_an_engines_death_hands_back_and_rebuilds(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(f"{n}", user=LONG) for n in range(20)])
    async with draining(redis_url, look_ahead=4) as running:
        await soon(lambda: running.engines and running.engine.running == 4)
        running.engine.kill()
        await soon(lambda: len(running.engines) == 2 and running.engine.running == 4)
        attempts = {r.delivery.request_id: r.delivery.attempt
                    for r in running.drain.in_flight}  # fmt: skip
        deaths = {r.delivery.request_id: r.delivery.deaths
                  for r in running.drain.in_flight}  # fmt: skip
        # The same eight run again, in the same order; the look-ahead had not been in the engine.
        assert list(attempts) == submitted.ids[:8]
        assert set(attempts.values()) == {2}
        assert list(deaths.values()) == [1] * 4 + [0] * 4
        assert running.supervisor.deaths == 1
        await asyncio.to_thread(store.cancel, submitted.batch)


@pytest.mark.parametrize("culprit", [0, 31, 63])
async def test_one_poison_among_64_requests_is_found_and_the_others_complete(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, culprit: int
) -> None:
    bodies = [chat(f"question {n}") for n in range(64)]
    bodies[culprit]["user"] = "simulate:die"
    submitted = submit_batch(store, bodies=bodies)
    async with draining(
        redis_url, simulated_slots=64, simulated_latency_s=0.05, lease_s=60
    ) as running:
        await soon(lambda: now(store).finished, 30)
        assert running.supervisor.deaths <= 2 + 7
    assert (now(store).number("completed"), now(store).number("failed")) == (63, 1)
    assert error_of(redis_client, submitted.ids[culprit])["code"] == "poison"
    assert [letter["reason"][:6] for letter in store.dead_letters()] == ["poison"]
    assert redis_client.llen(keys.suspects_list(QUEUE)) == 0
    assert not redis_client.exists(keys.suspects_list(QUEUE) + ":lock")
    assert redis_client.hlen(keys.DEATHS) == 0


async def test_two_poisons_do_not_end_the_worker_and_the_queue_goes_on(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    bodies = [chat(f"question {n}") for n in range(40)]
    for culprit in (5, 22):
        bodies[culprit]["user"] = "simulate:die"
    submit_batch(store, bodies=bodies)
    async with draining(redis_url, simulated_slots=8, simulated_latency_s=0.01) as running:
        await soon(lambda: now(store).finished, 30)
        after = submit_batch(store, 10, batch_id="after")
        await soon(lambda: now(store, "after").finished)
        assert not running.task.done()  # type: ignore[union-attr]
    assert (now(store).number("completed"), now(store).number("failed")) == (38, 2)
    assert now(store, "after").number("completed") == len(after.ids)


async def test_halving_starts_anew_with_the_next_suspects(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    redis_client.set(keys.suspects_list(QUEUE) + ":group", 1)
    redis_client.lpush(keys.suspects_list(QUEUE), celery_message("last"))
    async with draining(redis_url):
        await soon(lambda: stored(redis_client, "last"))
        key = keys.suspects_list(QUEUE)
        await soon(lambda: not redis_client.exists(key + ":group", key + ":lock"))


async def test_suspects_wait_for_the_worker_that_has_their_lock_and_the_queue_does_not(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    suspects = keys.suspects_list(QUEUE)
    redis_client.lpush(suspects, celery_message("suspect"))
    redis_client.set(suspects + ":lock", "another worker")
    async with draining(redis_url, lease_s=2):
        submit_batch(store, 30)
        await soon(lambda: now(store).finished)
        assert stored(redis_client, "suspect") is None
        redis_client.delete(suspects + ":lock")
        await soon(lambda: stored(redis_client, "suspect"))


async def test_suspects_take_turns_with_the_queue(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    suspects = keys.suspects_list(QUEUE)
    poisons = [celery_message(f"p{n}", chat(user="simulate:die")) for n in range(24)]
    redis_client.lpush(suspects, *poisons)
    submit_batch(store, 100, batch_id="b", tenant="b")
    async with draining(redis_url, simulated_slots=8, simulated_latency_s=0.01) as running:
        await soon(lambda: now(store, "b").finished, 30)
        assert running.supervisor.deaths <= 20  # at most one for each that the queue was given
        assert len(list(store.dead_letters())) < 12
    assert now(store, "b").number("completed") == 100


class BrokenEngine(SimulatedEngine):
    """Starts, and dies at every request."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        raise EngineDead("broken for good")


async def test_an_engine_that_dies_at_everything_ends_the_worker_before_the_queue(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, 64)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with draining(redis_url, BrokenEngine, simulated_slots=8) as running:
            await running.ended(20)
    assert caught.value.subgroup(EngineDead)
    assert len(list(store.dead_letters())) <= 2
    waiting = sum(store.queue_lengths(QUEUE).values())
    assert waiting + len(list(store.dead_letters())) == 64
    assert leased(redis_client) == 0


class FussyEngine(BrokenEngine):
    """Refuses requests of the user `wrong`, and dies at every other."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if request.body["user"] == "wrong":
            raise RequestRejected("the model does not exist")
        return await super().generate(request, request_id)


async def test_rejected_requests_in_between_do_not_prove_a_broken_engine(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, bodies=[chat(user=user) for user in ("wrong", "right") * 20])
    with pytest.raises(BaseExceptionGroup) as caught:
        async with draining(redis_url, FussyEngine, simulated_slots=1, look_ahead=0) as running:
            await running.ended(20)
    assert caught.value.subgroup(EngineDead)
    assert "without completing a request" in str(caught.value.subgroup(EngineDead).exceptions)  # type: ignore[union-attr]
    assert len(list(store.dead_letters())) <= 2
    assert leased(redis_client) == 0


async def test_an_engine_whose_shutdown_hangs_is_not_waited_for_when_it_is_to_be_rebuilt(
    redis_server: RedisServer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "SHUTDOWN_S", 0.3)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with scene(redis_server, "shutdown") as on:
            await on.full()
            on.engine.kill()
            await on.running.ended()
    assert caught.value.subgroup(EngineDead)
    assert sum(Reads(redis_client).queue_lengths(QUEUE).values()) == 10
    assert leased(redis_client) == 0


class UnstartableEngine(SimulatedEngine):
    """Is built, but does not start."""

    freed = False

    async def start(self) -> Capacity:
        raise OSError("no such device")

    def shutdown(self) -> None:
        self.freed = True


async def test_an_engine_that_cannot_start_ends_the_worker_and_nothing_was_popped(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 3)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with draining(redis_url, UnstartableEngine) as running:
            await running.ended()
    assert "no such device" in str(caught.value.subgroup(OSError).exceptions)  # type: ignore[union-attr]
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids
    assert running.drain.counts.popped == 0
    assert [engine.freed for engine in running.engines] == [True]  # type: ignore[attr-defined]


class OnceEngine(SimulatedEngine):
    """Can be started once; later starts fail until `mended`."""

    built = 0
    mended = False

    def build(self) -> None:
        type(self).built += 1
        if self.built > 1 and not self.mended:
            raise OSError("device is lost")


async def test_a_rebuild_that_fails_is_tried_again_and_then_given_up(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    OnceEngine.built = 0
    submitted = submit_batch(store, bodies=[chat(user=LONG)] * 2)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with draining(redis_url, OnceEngine, rebuild_tries=2) as running:
            await soon(lambda: running.engines and running.engine.running == 2)
            running.engine.kill()
            await running.ended()
    assert OnceEngine.built == 3
    group = caught.value.subgroup(EngineDead)
    assert "2 tries" in str(group.exceptions)  # type: ignore[union-attr]
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids


async def test_stop_while_the_engine_is_rebuilt_ends_at_once(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    OnceEngine.built = 0
    submit_batch(store, bodies=[chat(user=LONG)] * 2)
    async with draining(redis_url, OnceEngine, rebuild_tries=20) as running:
        await soon(lambda: running.engines and running.engine.running == 2)
        running.engine.kill()
        await soon(lambda: running.state is State.DEGRADED and OnceEngine.built > 1)
        running.drain.stop()
        await running.ended(3)
