"""The drain in this process, with the simulated engine and a real Redis."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest
import redis
from lessee import (
    QUEUE,
    Lessee,
    celery_message,
    chat,
    queued_ids,
    stored,
    submit_batch,
)

from contract import keys
from contract.batch import Batch
from contract.errors import EngineDead, WarmqError
from contract.store import BatchStore
from demo.stack import RedisServer
from worker.drain import Drain
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.simulated import SimulatedEngine, digest
from worker.leases import Leases
from worker.settings import WorkerSettings
from worker.supervisor import State, Supervisor
from worker.upkeep import Upkeep

T = TypeVar("T")
LONG = "simulate:sleep=600"


async def soon(look: Callable[[], T], timeout_s: float = 10, what: str = "") -> T:
    """Return the first truthy value of `look`; the loop runs on meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not (value := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what or look}")
        await asyncio.sleep(0.005)
    return value


@dataclass
class Draining:
    """A drain that runs on the test's loop, and what it is made of."""

    settings: WorkerSettings
    leases: Leases
    supervisor: Supervisor
    drain: Drain
    upkeep: Upkeep
    engines: list[SimulatedEngine] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> SimulatedEngine:
        """The engine that was built last."""
        return self.engines[-1]

    async def ended(self, timeout_s: float = 10) -> None:
        """Wait until the drain has ended."""
        assert self.task is not None
        await asyncio.wait_for(asyncio.shield(self.task), timeout_s)


@asynccontextmanager
async def draining(
    url: str,
    engine: type[SimulatedEngine] = SimulatedEngine,
    upkeep: bool = True,
    **options: Any,
) -> AsyncIterator[Draining]:
    """Run a drain for the block; it is told to hurry at the end, if it still runs."""
    defaults = {"engine": "simulated", "simulated_slots": 4, "simulated_latency_s": 0.0}
    settings = WorkerSettings(redis_url=url, **(defaults | options))
    leases = Leases(settings, f"test.1.{time.monotonic_ns()}")
    engines: list[SimulatedEngine] = []

    def make() -> SimulatedEngine:
        engines.append(engine(settings.simulated_slots, settings.simulated_latency_s))
        return engines[-1]

    supervisor = Supervisor(make, settings.rebuild_tries, settings.max_deaths)
    drain = Drain(settings, leases, supervisor)
    running = Draining(
        settings, leases, supervisor, drain, Upkeep(settings, leases, drain), engines
    )
    side = running.upkeep.tasks() if upkeep else []
    running.task = asyncio.create_task(drain.run(side))
    try:
        yield running
        if not running.task.done():
            drain.hurry()
        await running.ended(20)
    finally:
        running.task.cancel()
        await asyncio.wait([running.task])
        await leases.close()


def send(client: redis.Redis, *bodies: dict[str, Any], **headers: Any) -> list[str]:
    """Queue plain Celery requests t0, t1, ...; return their ids."""
    ids = [f"t{n}" for n in range(len(bodies))]
    for rid, body in zip(ids, bodies, strict=True):
        client.lpush(QUEUE, celery_message(rid, body, **headers))
    return ids


def state(store: BatchStore, batch_id: str = "b1") -> Batch:
    """Return the batch as it is now."""
    batch = store.batch(batch_id)
    assert batch is not None
    return batch


def error_of(client: redis.Redis, request_id: str) -> dict[str, Any]:
    """Return the error of a stored result, or {}."""
    meta = stored(client, request_id)
    return (meta["warmq"]["error"] or {}) if meta else {}


def leased(client: redis.Redis) -> int:
    """Return how many leases there are, which both records agree on."""
    count = int(client.zcard(keys.LEASES))
    assert sum(client.hlen(key) for key in client.keys("warmq:worker:*")) == count
    return count


# -- the ordinary course ------------------------------------------------------------


async def test_a_batch_is_answered_and_each_answer_belongs_to_its_request(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    bodies = [chat(f"question {n}") for n in range(50)] + [{"prompt": f"p{n}"} for n in range(50)]
    submitted = submit_batch(store, bodies=bodies[:50])
    plain = send(redis_client, *bodies[50:])
    async with draining(redis_url, simulated_latency_s=0.005) as running:
        await soon(lambda: state(store).finished and stored(redis_client, plain[-1]))
        await soon(lambda: not running.drain.in_flight)
    metas = [stored(redis_client, rid) for rid in [*submitted.ids, *plain]]
    for body, meta in zip(bodies, metas, strict=True):
        assert meta is not None
        choice = meta["result"]["choices"][0]
        text = choice["message"]["content"] if "messages" in body else choice["text"]
        assert text == f"simulated {digest(body)}"
    assert state(store).status == "completed"
    assert state(store).number("completion_tokens") == 50
    assert leased(redis_client) == 0
    timing = metas[0]["warmq"]["timing"]  # type: ignore[index]
    assert timing["attempts"] == 1
    assert timing["queued_s"] >= 0
    assert running.drain.counts.completed == 100


async def test_slots_fill_up_with_a_small_look_ahead_above_them(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, bodies=[chat(f"{n}", user=LONG) for n in range(100)])
    async with draining(redis_url, simulated_slots=16) as running:
        await soon(lambda: running.engines and running.engine.running == 16)
        await soon(lambda: len(running.drain.in_flight) == 24)
        assert redis_client.llen(keys.priority_list(QUEUE, 6)) == 76


@pytest.mark.parametrize("look_ahead", [0, 1, 5])
async def test_every_slot_is_used_whatever_the_look_ahead(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, look_ahead: int
) -> None:
    submit_batch(store, 60)
    async with draining(redis_url, look_ahead=look_ahead, simulated_latency_s=0.002) as running:
        await soon(lambda: state(store).finished)
        assert running.drain.limit == 4 + look_ahead


async def test_a_high_priority_overtakes_what_waits_in_the_queue(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    low = submit_batch(store, 200, batch_id="low", priority=9)
    async with draining(redis_url, simulated_latency_s=0.01, look_ahead=1):
        await soon(lambda: state(store, "low").terminal > 5)
        high = submit_batch(store, 5, batch_id="high", priority=0)
        await soon(lambda: state(store, "high").finished)
        assert state(store, "low").terminal < 100
        await soon(lambda: state(store, "low").finished)
    assert len(high.ids) + len(low.ids) == 205


async def test_an_idle_drain_wakes_up_at_once(redis_client: redis.Redis, redis_url: str) -> None:
    # Without upkeep nothing but the blocked connections can wake it.
    async with draining(redis_url, upkeep=False) as running:
        await soon(lambda: running.supervisor.state is State.READY)
        for n, priority in enumerate((0, 3, 6, 9, 0, 6)):
            await soon(running.drain._hungry.is_set)
            began = time.monotonic()
            key = keys.priority_list(QUEUE, priority)
            redis_client.lpush(key, celery_message(f"wake{n}"))
            await soon(lambda n=n: stored(redis_client, f"wake{n}"))
            assert time.monotonic() - began < 1.0


# -- what a message may ask for ---------------------------------------------------------


async def test_a_request_that_expired_in_the_queue_never_runs(
    redis_client: redis.Redis, redis_url: str
) -> None:
    send(redis_client, chat(user=LONG), expires="2026-01-01T00:00:00+00:00")
    async with draining(redis_url) as running:
        await soon(lambda: stored(redis_client, "t0"))
        assert running.engine.steps == 0
    assert error_of(redis_client, "t0")["code"] == "expired"
    assert stored(redis_client, "t0")["status"] == "REVOKED"  # type: ignore[index]


async def test_a_deadline_that_passes_in_the_engine_frees_the_slot(
    redis_client: redis.Redis, redis_url: str
) -> None:
    seconds, micros = redis_client.time()
    send(redis_client, chat(user=LONG), expires=seconds + micros / 1e6 + 0.4)
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        await soon(lambda: stored(redis_client, "t0"))
        assert running.engine.running == 0
    assert error_of(redis_client, "t0")["code"] == "expired"


async def test_a_far_deadline_holds_nothing_when_its_request_has_ended(
    redis_client: redis.Redis, redis_url: str
) -> None:
    send(redis_client, *[chat()] * 20, expires=4e9)
    async with draining(redis_url, upkeep=False) as running:
        await soon(lambda: stored(redis_client, "t19"))
        await soon(lambda: not running.drain.in_flight)
        timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        assert not [t for t in timers if not t.cancelled() and t.when() > time.monotonic() + 3600]


async def test_results_that_nobody_wants_are_not_written_but_counted(
    redis_client: redis.Redis, redis_url: str
) -> None:
    send(redis_client, chat(), chat(user="simulate:fail"), ignore_result=True)
    async with draining(redis_url) as running:
        await soon(lambda: running.drain.counts.completed and running.drain.counts.failed)
        assert leased(redis_client) == 0
    assert not redis_client.keys(keys.RESULT_PREFIX + "*")
    assert redis_client.llen(QUEUE) == 0


def args(*values: object, kwargs: object = None, **embed: object) -> dict[str, Any]:
    """Return message fields with the given body."""
    return {"body": orjson.dumps([list(values), kwargs or {}, embed]).decode()}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    # name: (headers, other message fields, code, a part of the text)
    "eta": ({"eta": "2030-01-01T00:00:00"}, {}, "unsupported_option", "eta/countdown"),
    "chain": ({}, args(chat(), chain=[{"task": "next"}]), "unsupported_option", "chain"),
    "chord": ({}, args(chat(), chord={"task": "end"}), "unsupported_option", "chord"),
    "callback": ({}, args(chat(), callbacks=[{"task": "x"}]), "unsupported_option", "callbacks"),
    "errback": ({}, args(chat(), errbacks=[{"task": "x"}]), "unsupported_option", "errbacks"),
    "another task": ({"task": "os.system"}, {}, "unknown_task", "os.system"),
    "keyword arguments": ({}, args(kwargs={"prompt": "x"}), "invalid_request", "args=[body]"),
    "no argument": ({}, args(), "invalid_request", "exactly one argument"),
    "two arguments": ({}, args(chat(), chat()), "invalid_request", "exactly one argument"),
    "a text for a body": ({}, args("Hello"), "invalid_request", "exactly one argument"),
    "pickle": ({}, {"content-type": "application/x-python-serialize"}, "invalid_request",
               "only application/json"),
    "bad JSON": ({}, {"body": "[["}, "invalid_request", "unreadable message body"),
    "another shape": ({}, {"body": "{}"}, "invalid_request", "unreadable message body"),
    "neither form": ({}, args({"max_tokens": 1}), "invalid_request", "messages"),
    "a bad value": ({}, args(chat(max_tokens=0)), "invalid_request", "max_tokens"),
    "an unknown field": ({}, args(chat(max_token=5)), "unknown_field", "max_token"),
    "streaming": ({}, args(chat(stream=True)), "invalid_request", "cannot stream"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_supported_fails_with_a_clear_text(
    redis_client: redis.Redis, redis_url: str, name: str
) -> None:
    headers, fields, code, text = REFUSED[name]
    message = orjson.loads(celery_message("t0", **headers)) | fields
    redis_client.lpush(QUEUE, celery_message("good"), orjson.dumps(message))
    async with draining(redis_url, upkeep=False):
        await soon(lambda: stored(redis_client, "t0") and stored(redis_client, "good"))
    error = error_of(redis_client, "t0")
    assert error["code"] == code
    assert text in error["message"]
    meta = stored(redis_client, "t0")
    assert meta is not None
    assert (meta["status"], meta["result"]["exc_type"]) == ("FAILURE", "RequestRejected")
    assert not error_of(redis_client, "good")


async def test_a_base64_body_is_read(redis_client: redis.Redis, redis_url: str) -> None:
    message = orjson.loads(celery_message("t0"))
    message["body"] = base64.b64encode(message["body"].encode()).decode()
    message["properties"]["body_encoding"] = "base64"
    bad = orjson.loads(celery_message("t1"))
    bad["properties"]["body_encoding"] = "base64"
    redis_client.lpush(QUEUE, orjson.dumps(message), orjson.dumps(bad))
    async with draining(redis_url, upkeep=False):
        await soon(lambda: stored(redis_client, "t0") and stored(redis_client, "t1"))
    assert stored(redis_client, "t0")["status"] == "SUCCESS"  # type: ignore[index]
    assert "unreadable message body" in error_of(redis_client, "t1")["message"]


async def test_another_model_than_the_served_one_is_refused_by_name(
    redis_client: redis.Redis, redis_url: str
) -> None:
    for rid, model in (("t0", "big"), ("t1", "tiny"), ("t2", None)):
        body = chat() if model is None else chat(model=model)
        redis_client.lpush("warmq.tiny", celery_message(rid, body))
    async with draining(redis_url, served_model_name="tiny"):
        await soon(lambda: all(stored(redis_client, rid) for rid in ("t0", "t1", "t2")))
    assert error_of(redis_client, "t0")["code"] == "model_not_found"
    assert "--model big" in error_of(redis_client, "t0")["message"]
    assert stored(redis_client, "t1")["status"] == "SUCCESS"  # type: ignore[index]
    assert stored(redis_client, "t2")["status"] == "SUCCESS"  # type: ignore[index]


@pytest.mark.parametrize(
    "header",
    [b'"warmq":{"line":1e999}', b'"text":"\xff\xfe"', b'"deep":' + b"[" * 500 + b"]" * 500],
)
async def test_what_only_pythons_decoder_refuses_becomes_a_dead_letter_with_an_answer(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, header: bytes
) -> None:
    odd = celery_message("odd").replace(b'"headers":{', b'"headers":{' + header + b",", 1)
    redis_client.lpush(QUEUE, celery_message("before"), odd, celery_message("after"))
    async with draining(redis_url, upkeep=False):
        await soon(lambda: all(stored(redis_client, rid) for rid in ("before", "odd", "after")))
        await soon(lambda: leased(redis_client) == 0)
    if store.dead_letters():
        assert error_of(redis_client, "odd")["code"] == "invalid_json"
    else:
        assert stored(redis_client, "odd")["status"] == "SUCCESS"  # type: ignore[index]


# -- faults of one request ---------------------------------------------------------------


class FaultyEngine(SimulatedEngine):
    """Raises what a library might, for requests that ask for it."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        fate = request.body.get("user")
        if fate == "raise":
            raise ZeroDivisionError("no idea")
        if fate == "cancel":
            raise asyncio.CancelledError
        return await super().generate(request, request_id)


@pytest.mark.parametrize("fate", ["raise", "cancel", "simulate:fail"])
async def test_an_unknown_fault_fails_one_request_only(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, fate: str
) -> None:
    bodies = [chat(), chat(user=fate), chat()]
    submitted = submit_batch(store, bodies=bodies)
    async with draining(redis_url, FaultyEngine, upkeep=False) as running:
        await soon(lambda: state(store).finished)
        await soon(lambda: not running.drain.in_flight)
        assert running.supervisor.deaths == 0
    assert (state(store).number("completed"), state(store).number("failed")) == (2, 1)
    assert error_of(redis_client, submitted.ids[1])["code"] == "request_failed"
    assert store.retry(submitted.batch, ["failed"]) == 1


# -- cancel -------------------------------------------------------------------------------


async def test_cancel_of_a_running_request_frees_its_slot_at_once(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(f"{n}", user=LONG) for n in range(3)])
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 3)
        assert await asyncio.to_thread(store.cancel_request, submitted.batch, "c2") == 1
        began = time.monotonic()
        await soon(lambda: running.engine.running == 2)
        assert time.monotonic() - began < 0.5
        await soon(lambda: leased(redis_client) == 2)
    assert error_of(redis_client, submitted.ids[1])["code"] == "cancelled"
    assert state(store).number("cancelled") == 1


async def test_cancel_of_a_batch_ends_running_and_queued_requests(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(f"{n}", user=LONG) for n in range(100)])
    other = submit_batch(store, 3, batch_id="other")
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 4)
        await asyncio.to_thread(store.cancel, submitted.batch)
        await soon(lambda: state(store).finished)
        await soon(lambda: state(store, "other").finished)
        await soon(lambda: leased(redis_client) == 0)
    assert (state(store).status, state(store).number("cancelled")) == ("cancelled", 100)
    assert state(store, "other").number("completed") == len(other.ids)
    assert store.retry(submitted.batch, ["cancelled"]) == 100


async def test_revoke_ends_running_and_queued_requests(
    redis_client: redis.Redis, redis_url: str
) -> None:
    send(redis_client, *[chat(f"{n}", user=LONG) for n in range(10)])
    async with draining(redis_url, look_ahead=0) as running:
        await soon(lambda: running.engines and running.engine.running == 4)
        await running.upkeep.revoke(["t0", "t9"])
        await soon(lambda: error_of(redis_client, "t0").get("code") == "cancelled")
        await running.upkeep.revoke(["t1", "t2", "t3", *(f"t{n}" for n in range(4, 9))])
        await soon(lambda: error_of(redis_client, "t9").get("code") == "cancelled")
        await soon(lambda: leased(redis_client) == 0)
    assert redis_client.llen(QUEUE) == 0


async def test_a_cancel_that_was_missed_is_caught_up_with_when_listening_again(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(user=LONG)])
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        # Given the cancel's message gets lost: it is published to nobody
        meta = b'{"status":"REVOKED","warmq":{"error":{"code":"cancelled"}}}'
        redis_client.set(keys.result_key(submitted.ids[0]), meta)
        # When the listening connection breaks
        redis_client.client_kill_filter(_type="pubsub")
        # Then the request is aborted all the same
        await soon(lambda: running.engine.running == 0)


# -- deaths ---------------------------------------------------------------------------------


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
        await soon(lambda: state(store).finished, 30)
        assert running.supervisor.deaths <= 2 + 7
    assert (state(store).number("completed"), state(store).number("failed")) == (63, 1)
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
        await soon(lambda: state(store).finished, 30)
        after = submit_batch(store, 10, batch_id="after")
        await soon(lambda: state(store, "after").finished)
        assert not running.task.done()  # type: ignore[union-attr]
    assert (state(store).number("completed"), state(store).number("failed")) == (38, 2)
    assert state(store, "after").number("completed") == len(after.ids)


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
        await soon(lambda: state(store).finished)
        assert stored(redis_client, "suspect") is None
        redis_client.delete(suspects + ":lock")
        await soon(lambda: stored(redis_client, "suspect"))


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
    assert len(store.dead_letters()) <= 2
    waiting = sum(redis_client.llen(key) for key in keys.priority_lists(QUEUE))
    waiting += redis_client.llen(keys.suspects_list(QUEUE))
    assert waiting + len(store.dead_letters()) == 64
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
    assert redis_client.get(keys.LEASE_SEQ) is None
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
    async with draining(redis_url, OnceEngine, rebuild_tries=50) as running:
        await soon(lambda: running.engines and running.engine.running == 2)
        running.engine.kill()
        await soon(lambda: running.supervisor.state is State.DEGRADED and OnceEngine.built > 1)
        running.drain.stop()
        await running.ended(3)


class HangingEngine(SimulatedEngine):
    """Makes no step, once."""

    async def start(self) -> Capacity:
        capacity = await super().start()
        self.mute = type(self).hang
        type(self).hang = False
        return capacity

    hang = True

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if self.mute:
            await self._dead.wait()
            raise EngineDead("killed")
        return await super().generate(request, request_id)

    def last_progress(self) -> float:
        return 0.0


async def test_an_engine_that_hangs_is_killed_and_its_requests_run_again(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    HangingEngine.hang = True
    submitted = submit_batch(store, 3)
    async with draining(redis_url, HangingEngine, stall_timeout_s=0.3) as running:
        await soon(lambda: state(store).finished)
        assert running.supervisor.deaths == 1
    meta = stored(redis_client, submitted.ids[0])
    assert meta is not None
    assert meta["warmq"]["timing"]["attempts"] == 2


class SilentEngine(SimulatedEngine):
    """Makes no step, and when it is killed tells nobody; the second one works."""

    built = 0

    def build(self) -> None:
        SilentEngine.built += 1
        self.silent = SilentEngine.built == 1

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if self.silent:
            await asyncio.Event().wait()
        return await super().generate(request, request_id)

    def last_progress(self) -> float:
        return 0.0 if self.silent else super().last_progress()


async def test_requests_that_a_dead_engine_never_gives_back_are_taken_from_it(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    SilentEngine.built = 0
    submit_batch(store, 3)
    async with draining(redis_url, SilentEngine, stall_timeout_s=0.2) as running:
        await soon(lambda: state(store).finished)
        assert running.supervisor.deaths == 1
    assert state(store).number("completed") == 3


# -- leases that were lost ------------------------------------------------------------------


async def test_work_whose_lease_is_lost_is_aborted_and_commits_nothing(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(user=LONG)])
    other = Lessee(redis_client, "other")
    async with draining(redis_url, lease_s=2) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        # Given another worker swept the lease and has the request now
        (lease,) = running.drain.in_flight.leases()
        redis_client.zadd(keys.LEASES, {lease: 1})
        other.allow_sweep()
        assert other.sweep(lease_ms=2000) == 1
        (fresh,) = other.pop()
        # When this worker renews
        await soon(lambda: running.engine.running == 0)
        # Then it has no ending for the request
        assert not running.drain.in_flight
        assert stored(redis_client, submitted.ids[0]) is None
        other.done(fresh)
    assert state(store).number("completed") == 1


@pytest.mark.parametrize("fate", ["simulate:sleep=1.2", "simulate:fail-later"])
async def test_a_request_that_comes_back_to_the_worker_that_still_runs_it_is_not_lost(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, fate: str
) -> None:
    """Its old lease was swept; the new one must answer for it, whichever way it ends."""
    submitted = submit_batch(store, bodies=[chat(user=fate)])
    other = Lessee(redis_client, "other")
    async with draining(redis_url, LateFailure, lease_s=2) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        (lease,) = running.drain.in_flight.leases()
        redis_client.zadd(keys.LEASES, {lease: 1})
        other.allow_sweep()
        assert other.sweep(lease_ms=2000) == 1
        await soon(lambda: running.drain.counts.popped == 2)
        await soon(lambda: state(store).finished)
        await soon(lambda: not running.drain.in_flight)
        assert leased(redis_client) == 0
    assert stored(redis_client, submitted.ids[0])
    assert state(store).terminal == 1


class LateFailure(SimulatedEngine):
    """Fails a request after it ran for a while."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if request.body.get("user") == "simulate:fail-later":
            body = request.body | {"user": "simulate:sleep=1.2"}
            await super().generate(EngineRequest(request.url, body), request_id)
            raise ZeroDivisionError("late")
        return await super().generate(request, request_id)


async def test_one_task_id_twice_at_once_runs_once_and_leaves_no_lease(
    redis_client: redis.Redis, redis_url: str
) -> None:
    body = chat(user="simulate:sleep=0.3")
    redis_client.lpush(QUEUE, celery_message("same", body), celery_message("same", body))
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        await soon(lambda: stored(redis_client, "same"))
        await soon(lambda: leased(redis_client) == 0)
        assert running.engine.steps == 2  # one began, one ended
    assert redis_client.llen(QUEUE) == 0


async def test_a_pop_whose_reply_is_lost_is_handed_back_by_renew_in_its_old_order(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 20)
    leases = Leases(WorkerSettings(redis_url=redis_url, engine="simulated"), "w1")
    try:
        await leases.pop(20, 4)
        assert await leases.renew([]) == []
        assert queued_ids(redis_client, submitted.list_key) == submitted.ids
        assert leased(redis_client) == 0
    finally:
        await leases.close()


async def test_renew_hands_nothing_back_while_a_pop_is_under_way(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, 500)
    leases = Leases(WorkerSettings(redis_url=redis_url, engine="simulated"), "w1")
    held: list[str] = []
    try:
        for _ in range(20):
            popped, lost = await asyncio.gather(leases.pop(20, 4), leases.renew(held))
            assert lost == []
            held += [delivery.lease for delivery in popped.deliveries]
        assert len(held) == leased(redis_client) == 400
    finally:
        await leases.close()


# -- stopping -----------------------------------------------------------------------------------


async def test_a_graceful_stop_hands_the_look_ahead_back_at_once_and_finishes_the_rest(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(
        store, bodies=[chat(f"{n}", user="simulate:sleep=1") for n in range(20)]
    )
    async with draining(redis_url, look_ahead=4) as running:
        await soon(lambda: running.engines and running.engine.running == 4)
        await soon(lambda: len(running.drain.in_flight) == 8)
        running.drain.stop()
        await soon(lambda: redis_client.llen(submitted.list_key) == 16, 0.8)
        assert state(store).terminal == 0
        await running.ended()
    assert state(store).number("completed") == 4
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids[4:]
    assert leased(redis_client) == 0
    assert redis_client.hlen(keys.DEATHS) == 0
    assert not redis_client.hlen(keys.WORKERS)
    assert running.supervisor.state is State.STOPPED


async def test_hurry_hands_back_everything_without_a_death(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(f"{n}", user=LONG) for n in range(20)])
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 4)
        running.drain.stop()
        await soon(lambda: len(running.drain.in_flight) == 4)
        running.drain.hurry()
        await running.ended(2)
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids
    assert leased(redis_client) == 0
    assert redis_client.hlen(keys.DEATHS) == 0


async def test_the_drain_timeout_bounds_a_graceful_stop(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(user=LONG)] * 2)
    async with draining(redis_url, drain_timeout_s=0.3) as running:
        await soon(lambda: running.engines and running.engine.running == 2)
        running.drain.stop()
        await running.ended(3)
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids


async def test_an_engine_that_dies_while_draining_blames_nobody(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(user=LONG)] * 2)
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 2)
        running.drain.stop()
        await soon(lambda: running.supervisor.state is State.DRAINING)
        running.engine.kill()
        await running.ended()
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids
    assert redis_client.hlen(keys.DEATHS) == 0


class SlowStart(SimulatedEngine):
    """Takes for ever to start."""

    async def start(self) -> Capacity:
        await asyncio.sleep(600)
        return await super().start()


async def test_stop_while_the_engine_starts_ends_at_once(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 3)
    async with draining(redis_url, SlowStart) as running:
        await soon(lambda: running.engines)
        running.drain.stop()
        await running.ended(2)
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids


# -- Redis goes away ---------------------------------------------------------------------------


@pytest.fixture
def own_redis(tmp_path: Path):
    """Return a private Redis that the test may stop."""
    with RedisServer(tmp_path, "--appendonly", "no") as server:
        yield server


async def test_a_stop_without_redis_ends_within_bounds(own_redis: RedisServer) -> None:
    with own_redis.client() as client:
        send(client, *[chat(f"{n}", user=LONG) for n in range(10)])
    with pytest.raises(BaseExceptionGroup) as caught:
        async with draining(own_redis.url, drain_timeout_s=0.2) as running:
            await soon(lambda: running.engines and running.engine.running == 4)
            own_redis.stop()
            running.drain.stop()
            await running.ended(30)
    assert "Redis is away" in str(caught.value.subgroup(WarmqError).exceptions)  # type: ignore[union-attr]
    assert running.supervisor.state is State.STOPPED


async def test_a_second_signal_without_redis_gets_out_soon(own_redis: RedisServer) -> None:
    with own_redis.client() as client:
        send(client, *[chat(f"{n}", user=LONG) for n in range(10)])
    with pytest.raises(BaseExceptionGroup):
        async with draining(own_redis.url, drain_timeout_s=60) as running:
            await soon(lambda: running.engines and running.engine.running == 4)
            own_redis.stop()
            running.drain.stop()
            running.drain.hurry()
            await running.ended(9)


async def test_a_side_task_that_dies_ends_the_drain_and_hands_back(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(f"{n}", user=LONG) for n in range(10)])
    with pytest.raises(BaseExceptionGroup) as caught:
        async with draining(redis_url, drain_timeout_s=0.1) as running:
            await soon(lambda: running.engines and running.engine.running == 4)

            def broken(group: object) -> None:
                raise ZeroDivisionError("the committer is broken")

            running.drain._committer._committed = broken
            await asyncio.to_thread(store.cancel_request, submitted.batch, "c1")
            await running.ended(30)
    assert caught.value.subgroup(ZeroDivisionError)
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids[1:]
