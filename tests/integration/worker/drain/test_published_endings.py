"""Whoever waits for a request of no batch hears of its end, whatever it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import redis
from kit.drain.draining import LONG, draining, soon
from kit.protocol.lessee import QUEUE, Lessee, celery_message, chat, stored

from contract.redis import keys
from demo.stack import eventually

PAST, SOON = 1.0, 0.3
SUSPECTS = [keys.suspects_list(QUEUE)]


class Waiting:
    """Whoever waits for one result."""

    def __init__(self, client: redis.Redis, request_id: str) -> None:
        self.client = client
        self.request_id = request_id
        self.metas: list[dict[str, Any]] = []
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(keys.result_key(request_id))
        self._pubsub.get_message(timeout=5)

    def heard(self) -> list[dict[str, Any]]:
        """Return what was published so far."""
        while message := self._pubsub.get_message():
            self.metas.append(orjson.loads(message["data"]))
        return self.metas

    def heard_once(self) -> dict[str, Any]:
        """Return the one meta that was published, which is the stored one."""
        # What was published has left Redis; it comes on a connection of its own.
        (meta,) = eventually(self.heard, 5, "the meta is heard")
        assert meta == stored(self.client, self.request_id)
        assert self.client.pttl(keys.result_key(self.request_id)) > 0
        return meta


#: By name: body, headers, status, error code; what the worker makes of it.
BY_THE_WORKER: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "completed": (chat(), {}, "SUCCESS", ""),
    "rejected": (chat(max_tokens=0), {}, "FAILURE", "invalid_request"),
    "of an unknown url": (chat(), {"warmq": {"url": "/v1/audio"}}, "FAILURE", "unknown_url"),
    "of another task": (chat(), {"task": "os.system"}, "FAILURE", "unknown_task"),
    "failed": (chat(user="simulate:fail"), {}, "FAILURE", "request_failed"),
    "expired in the queue": (chat(), {"warmq": {"deadline": PAST}}, "REVOKED", "expired"),
    "expired by Celery": (chat(), {"expires": "2020-01-01T00:00:00"}, "REVOKED", "expired"),
    "unreadable": (chat(), {"deep": "deep"}, "FAILURE", "invalid_json"),
}


@pytest.mark.parametrize("name", BY_THE_WORKER)
async def test_an_ending_is_published(redis_client: redis.Redis, redis_url: str, name: str) -> None:
    body, headers, status, code = BY_THE_WORKER[name]
    waiting = Waiting(redis_client, "r")
    message = celery_message("r", body, **headers)
    redis_client.lpush(QUEUE, message.replace(b'"deep"', b'"deep":1,"\xff"', 1))
    async with draining(redis_url, side_tasks=False):
        await soon(waiting.heard)
    meta = waiting.heard_once()
    assert meta["status"] == status
    assert ((meta["warmq"] or {}).get("error") or {}).get("code", "") == code


async def test_a_deadline_that_comes_while_it_runs_is_published(
    redis_client: redis.Redis, redis_url: str
) -> None:
    waiting = Waiting(redis_client, "r")
    async with draining(redis_url) as running:
        await soon(lambda: running.engines)
        deadline = {"warmq": {"deadline": time.time() + SOON}}
        redis_client.lpush(QUEUE, celery_message("r", chat(user=LONG), **deadline))
        await soon(waiting.heard)
    assert waiting.heard_once()["warmq"]["error"]["code"] == "expired"


async def test_a_cancellation_is_published_of_what_runs_and_of_what_waits(
    redis_client: redis.Redis, redis_url: str
) -> None:
    runs, waits = Waiting(redis_client, "runs"), Waiting(redis_client, "waits")
    async with draining(redis_url, simulated_slots=1, look_ahead=0) as running:
        await soon(lambda: redis_client.pubsub_numsub(keys.CANCEL_CHANNEL)[0][1])
        for request_id in ("runs", "waits"):
            redis_client.lpush(QUEUE, celery_message(request_id, chat(user=LONG)))
        await soon(lambda: running.engines and running.engine.running == 1)
        # As a gateway does: remembered for POP, and told to whoever runs it
        lessee = Lessee(redis_client)
        lessee.run("revoke", 600, "runs", "waits")
        for channel in (keys.CANCEL_CHANNEL, keys.BATCH_CANCEL_CHANNEL):
            redis_client.publish(channel, b"[" * 1000 + b"]" * 1000)  # anybody may publish anything
        redis_client.publish(keys.CANCEL_CHANNEL, orjson.dumps(["runs", "waits"]))
        await soon(lambda: runs.heard() and waits.heard())
    for waiting in (runs, waits):
        meta = waiting.heard_once()
        assert (meta["status"], meta["warmq"]["error"]["code"]) == ("REVOKED", "cancelled")


def by_bury(lessee: Lessee) -> None:
    (lease,) = lessee.pop()
    lessee.bury(lease, "Python cannot read it")


def by_release(lessee: Lessee) -> None:
    """The engine dies with it: in the queue, and twice alone among the suspects."""
    for lists in ([], [], SUSPECTS, SUSPECTS):
        (lease,) = lessee.pop(lists=lists)
        lessee.release(lease, died=[lease])


def by_sweep(lessee: Lessee) -> None:
    """The same, of workers that die."""
    for lists in ([], [], SUSPECTS, SUSPECTS):
        (lease,) = lessee.pop(lists=lists)
        lessee.expire_leases(lease)
        lessee.sweep()


@pytest.mark.parametrize("kill", [by_bury, by_release, by_sweep])
def test_the_failure_of_a_dead_letter_is_published(
    redis_client: redis.Redis, kill: Callable[[Lessee], None]
) -> None:
    waiting = Waiting(redis_client, "r")
    redis_client.lpush(QUEUE, celery_message("r"))
    kill(Lessee(redis_client))
    meta = waiting.heard_once()
    assert meta["status"] == "FAILURE"
    assert meta["warmq"]["error"]["code"] in ("poison", "invalid_json")
    assert redis_client.hlen(keys.DEAD) == 1


def test_a_request_that_comes_again_after_its_end_publishes_nothing_and_keeps_its_result(
    redis_client: redis.Redis,
) -> None:
    lessee = Lessee(redis_client)
    redis_client.lpush(QUEUE, celery_message("r"))
    lessee.done(*lessee.pop())
    waiting = Waiting(redis_client, "r")
    redis_client.lpush(QUEUE, celery_message("r"))
    assert lessee.pop() == []
    assert waiting.heard() == []
    assert stored(redis_client, "r") is not None
