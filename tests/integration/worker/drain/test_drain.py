"""The drain in this process: the ordinary course, and what a message may ask for."""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from kit.drain.draining import LONG, draining, error_of, leased, send, soon
from kit.protocol.lessee import (
    QUEUE,
    celery_message,
    chat,
    now,
    stored,
    submit_batch,
)

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer
from worker.drain.lifecycle import State
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.simulated.engine import SimulatedEngine, digest

# -- the ordinary course ---------------------------------------------------------------------


async def test_a_batch_is_answered_and_each_answer_belongs_to_its_request(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    bodies = [chat(f"question {n}") for n in range(50)] + [{"prompt": f"p{n}"} for n in range(50)]
    submitted = submit_batch(store, bodies=bodies[:50])
    plain = send(redis_client, *bodies[50:])
    async with draining(redis_url, simulated_latency_s=0.005) as running:
        await soon(lambda: now(store).finished and stored(redis_client, plain[-1]))
        await soon(lambda: not running.drain.in_flight)
    metas = [stored(redis_client, rid) for rid in [*submitted.ids, *plain]]
    for body, meta in zip(bodies, metas, strict=True):
        assert meta is not None
        choice = meta["result"]["choices"][0]
        text = choice["message"]["content"] if "messages" in body else choice["text"]
        assert text == f"simulated {digest(body)}"
    assert now(store).status == "completed"
    assert now(store).number("completion_tokens") == 50
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
        assert redis_client.llen(naming.turn_list(QUEUE, 6, "default", "b1")) == 76


@pytest.mark.parametrize("look_ahead", [0, 1, 5])
async def test_every_slot_is_used_whatever_the_look_ahead(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, look_ahead: int
) -> None:
    submit_batch(store, 60)
    async with draining(redis_url, look_ahead=look_ahead, simulated_latency_s=0.002) as running:
        await soon(lambda: now(store).finished)
        assert running.drain.limits.limit == 4 + look_ahead


async def test_a_high_priority_overtakes_what_waits_in_the_queue(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    low = submit_batch(store, 200, batch_id="low", priority=9)
    async with draining(redis_url, simulated_latency_s=0.01, look_ahead=1):
        await soon(lambda: now(store, "low").terminal > 5)
        high = submit_batch(store, 5, batch_id="high", priority=0)
        await soon(lambda: now(store, "high").finished)
        assert now(store, "low").terminal < 100
        await soon(lambda: now(store, "low").finished)
    assert len(high.ids) + len(low.ids) == 205


async def test_an_idle_drain_wakes_up_at_once(redis_client: redis.Redis, redis_url: str) -> None:
    # Without side tasks nothing but Redis' word of a new message can wake it.
    async with draining(redis_url, side_tasks=False) as running:
        await soon(lambda: running.state is State.READY)
        for n, priority in enumerate((0, 3, 6, 9, 0, 6)):
            await soon(running.drain.wakeup.queue_empty.is_set)
            began = time.monotonic()
            key = naming.priority_list(QUEUE, priority)
            redis_client.lpush(key, celery_message(f"wake{n}"))
            await soon(lambda n=n: stored(redis_client, f"wake{n}"))
            assert time.monotonic() - began < 1.0


# -- what a message may ask for --------------------------------------------------------------


async def test_a_request_that_expired_in_the_queue_never_runs(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    send(redis_client, chat(user=LONG), expires="2026-01-01T00:00:00+00:00")
    redis_client.lpush(QUEUE, celery_message("t1"))
    log = tmp_path / "log"
    async with draining(redis_url, partial(SimulatedEngine, log=log)):
        await soon(lambda: stored(redis_client, "t0") and stored(redis_client, "t1"))
    began_and_ended = [line.split()[:2] for line in log.read_text().splitlines()]
    assert began_and_ended == [["start", "t1"], ["end", "t1"]]
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
    async with draining(redis_url, side_tasks=False) as running:
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
    assert not redis_client.keys(naming.RESULT_PREFIX + "*")
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
    async with draining(redis_url, side_tasks=False):
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
    async with draining(redis_url, side_tasks=False):
        await soon(lambda: stored(redis_client, "t0") and stored(redis_client, "t1"))
    assert stored(redis_client, "t0")["status"] == "SUCCESS"  # type: ignore[index]
    assert "unreadable message body" in error_of(redis_client, "t1")["message"]


class WithAdapter(SimulatedEngine):
    async def start(self) -> Capacity:
        return replace(await super().start(), adapters=("adapter",))


async def test_another_model_than_the_served_one_is_refused_by_name(
    redis_client: redis.Redis, redis_url: str
) -> None:
    for rid, model in (("t0", "big"), ("t1", "tiny"), ("t2", None), ("t3", "adapter")):
        body = chat() if model is None else chat(model=model)
        redis_client.lpush("warmq.tiny", celery_message(rid, body))
    async with draining(redis_url, WithAdapter, served_model_name="tiny"):
        await soon(lambda: all(stored(redis_client, rid) for rid in ("t0", "t1", "t2", "t3")))
    assert not error_of(redis_client, "t3")
    assert error_of(redis_client, "t0")["code"] == "model_not_found"
    assert "serves 'tiny', 'adapter', not 'big'" in error_of(redis_client, "t0")["message"]
    message = error_of(redis_client, "t0")["message"]
    assert message.endswith("send the request to the queue of a worker that serves 'big'")
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
    async with draining(redis_url, side_tasks=False):
        await soon(lambda: all(stored(redis_client, rid) for rid in ("before", "odd", "after")))
        await soon(lambda: leased(redis_client) == 0)
    if any(store.dead_letters()):
        assert error_of(redis_client, "odd")["code"] == "invalid_json"
    else:
        assert stored(redis_client, "odd")["status"] == "SUCCESS"  # type: ignore[index]


# -- faults of one request -------------------------------------------------------------------


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
    async with draining(redis_url, FaultyEngine, side_tasks=False) as running:
        await soon(lambda: now(store).finished)
        await soon(lambda: not running.drain.in_flight)
        assert running.supervisor.deaths == 0
    assert (now(store).number("completed"), now(store).number("failed")) == (2, 1)
    assert error_of(redis_client, submitted.ids[1])["code"] == "request_failed"
    assert store.retry(submitted.batch, ["failed"]) == 1


# -- cancel ----------------------------------------------------------------------------------


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
    assert now(store).number("cancelled") == 1


async def test_cancel_of_a_batch_ends_running_and_queued_requests(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(f"{n}", user=LONG) for n in range(100)])
    other = submit_batch(store, 3, batch_id="other")
    async with draining(redis_url) as running:
        await soon(lambda: running.engines and running.engine.running == 4)
        await asyncio.to_thread(store.cancel, submitted.batch)
        await soon(lambda: now(store).finished)
        await soon(lambda: now(store, "other").finished)
        await soon(lambda: leased(redis_client) == 0)
    assert (now(store).status, now(store).number("cancelled")) == ("cancelled", 100)
    assert now(store, "other").number("completed") == len(other.ids)
    assert store.retry(submitted.batch, ["cancelled"]) == 100


async def test_revoke_ends_running_and_queued_requests(
    redis_client: redis.Redis, redis_url: str
) -> None:
    send(redis_client, *[chat(f"{n}", user=LONG) for n in range(10)])
    async with draining(redis_url, look_ahead=0) as running:
        await soon(lambda: running.engines and running.engine.running == 4)
        await running.side_tasks.cancels.revoke(["t0", "t9"])
        await soon(lambda: error_of(redis_client, "t0").get("code") == "cancelled")
        await running.side_tasks.cancels.revoke(["t1", "t2", "t3", *(f"t{n}" for n in range(4, 9))])
        await soon(lambda: error_of(redis_client, "t9").get("code") == "cancelled")
        await soon(lambda: leased(redis_client) == 0)
    assert redis_client.llen(QUEUE) == 0


async def test_requests_in_flight_at_an_automatic_stop_have_the_batchs_reason(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    bodies = [chat(f"{n}", user="simulate:fail" if n == 3 else LONG) for n in range(4)]
    submitted = submit_batch(store, bodies=bodies)
    redis_client.hset(keys.batch_key("b1"), "stop_after", "1")
    async with draining(redis_url, simulated_slots=4, look_ahead=0) as running:
        await soon(lambda: not running.drain.in_flight and now(store).finished)
    reason = now(store).fields["reason"]
    assert reason.startswith("stopped: 1 of 1 requests failed")
    assert [error_of(redis_client, rid)["message"] for rid in submitted.ids[:3]] == [reason] * 3


async def test_an_automatic_stop_that_was_missed_is_caught_up_with(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat("0", user=LONG)])
    async with draining(redis_url, simulated_slots=4) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        state = {"cancelling": 1, "sealed": 1, "stopped": "sealed", "reason": "stopped: too many"}
        redis_client.hset(keys.batch_key("b1"), mapping=state)
        redis_client.client_kill_filter(_type="pubsub")
        await soon(lambda: now(store).finished)
    error = error_of(redis_client, submitted.ids[0])
    assert (error["code"], error["message"]) == ("cancelled", "stopped: too many")


async def test_a_cancel_that_was_missed_is_caught_up_with_when_listening_again(
    own: RedisServer, own_store: BatchStore
) -> None:
    submitted = submit_batch(own_store, bodies=[chat(user=LONG)])
    async with draining(own.url) as running:
        await soon(lambda: running.engines and running.engine.running == 1)
        # Given the cancel's message gets lost: it is published to nobody
        meta = b'{"status":"REVOKED","warmq":{"error":{"code":"cancelled"}}}'
        own.client().set(keys.result_key(submitted.ids[0]), meta)
        # When the listening connection breaks
        own.client().client_kill_filter(_type="pubsub")
        # Then the request is aborted all the same
        await soon(lambda: running.engine.running == 0)


async def test_requests_of_a_cancelled_batch_count_their_time_in_the_queue_from_its_retry(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    # Given a batch that was made an hour ago and cancelled
    submitted = submit_batch(store, 3)
    key, created = submitted.list_key, submitted.batch.created
    for n, raw in enumerate(redis_client.lrange(key, 0, -1)):
        ago = str(int(created) - 3_600_000)
        redis_client.lset(key, n, raw.replace(created.encode(), ago.encode()))
    store.cancel(submitted.batch)
    # When it is retried and runs
    store.retry(submitted.batch, ["cancelled"])
    async with draining(redis_url, simulated_latency_s=0.005):
        await soon(lambda: now(store).finished)
    # Then the hour does not count
    for rid in submitted.ids:
        meta = stored(redis_client, rid)
        assert meta is not None
        assert 0 <= meta["warmq"]["timing"]["queued_s"] < 60
