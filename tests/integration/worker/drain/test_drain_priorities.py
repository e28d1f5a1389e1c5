"""An online request passes what waits in the engine; deaths and stops know that it may."""

from __future__ import annotations

import asyncio
import time

import redis
from kit.drain.draining import draining, error_of, leased, soon
from kit.protocol.lessee import QUEUE, chat, now, queued_ids, stored, submit_batch

from contract import naming
from contract.message import write_online
from contract.openai.body import CHAT_URL
from contract.openai.decode import encode
from contract.redis import keys
from contract.redis.batches import BatchStore

#: The slots and the look-ahead of the drains of this file.
ROOM = {"simulated_slots": 2, "look_ahead": 8}


def send_online(client: redis.Redis, request_id: str, user: str = "", priority: int = 0) -> None:
    """Queue a request as a gateway does."""
    body = encode(chat(request_id, **({"user": user} if user else {})))
    message = write_online(
        request_id, CHAT_URL, body, queue=QUEUE, priority=priority, tenant="people",
        deadline=time.time() + 600, keep_ms=60_000,
    )  # fmt: skip
    list_key = naming.turn_list(QUEUE, priority, "people")
    ring = naming.turns_key(QUEUE, naming.priority_step(priority))
    pipe = client.pipeline()
    pipe.lpush(list_key, message)
    pipe.zadd(f"{ring}\x06people", {list_key: 0})
    pipe.zadd(ring, {"people": 0})
    pipe.execute()


def lines(count: int, seconds: float) -> list[dict[str, object]]:
    return [chat(f"{n}", user=f"simulate:sleep={seconds}") for n in range(count)]


async def test_an_online_request_starts_before_the_look_ahead_and_flex_before_the_batch(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    ended: dict[str, int] = {}
    submit_batch(store, bodies=lines(30, 0.3))
    async with draining(redis_url, **ROOM) as running:
        await soon(lambda: len(running.drain.in_flight) == 10)
        for name, priority in (("flex", 3), ("online", 0)):
            send_online(redis_client, name, priority=priority)
        while len(ended) < 2:
            for name in {"flex", "online"} - ended.keys():
                if stored(redis_client, name):
                    ended[name] = now(store).number("completed")
            await asyncio.sleep(0.005)
        # POP takes both when four have ended, and six are left in flight: in the order of arrival
        # these six would have started before.
        assert max(ended.values()) <= 7, ended
        await soon(lambda: now(store).finished)


async def test_an_online_request_is_taken_before_any_request_of_a_batch_ends(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, bodies=lines(40, 0.6))
    async with draining(redis_url, **ROOM) as running:
        drain = running.drain
        await soon(lambda: len(drain.in_flight) == 10)
        send_online(redis_client, "first")
        await soon(lambda: stored(redis_client, "first"))
        places = drain.limits.limit - drain.limits.reserved
        await soon(lambda: len(drain.in_flight) == places)
        # The batch runs on, while the reserved places stay free.
        ended = now(store).number("completed")
        await soon(lambda: now(store).number("completed") >= ended + 4)
        assert len(drain.in_flight) <= places
        ended = now(store).number("completed")
        for name in ("second", "third"):
            send_online(redis_client, name)
        await soon(lambda: drain.in_flight.unended("second") and drain.in_flight.unended("third"))
        assert now(store).number("completed") <= ended + 2
        await asyncio.to_thread(store.cancel, now(store))


async def test_an_online_request_that_kills_its_engine_counts_a_death(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, bodies=lines(40, 0.1))
    async with draining(redis_url, **ROOM) as running:
        await soon(lambda: len(running.drain.in_flight) == 10)
        send_online(redis_client, "poison", "simulate:die")
        await soon(lambda: stored(redis_client, "poison"), 30)
        assert error_of(redis_client, "poison")["code"] == "poison"
        await soon(lambda: now(store).finished)
        assert running.supervisor.deaths <= 6
    assert now(store).number("completed") == 40
    assert redis_client.hlen(keys.DEATHS) == 0


async def test_a_stop_lets_an_online_request_end_that_passed_the_look_ahead(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=lines(30, 0.4))
    async with draining(redis_url, drain_timeout_s=10, **ROOM) as running:
        await soon(lambda: len(running.drain.in_flight) == 10)
        send_online(redis_client, "online", "simulate:sleep=1")
        await soon(lambda: running.engine.text_so_far("online"))
        running.drain.stop()
        await running.ended()
    assert stored(redis_client, "online")
    assert redis_client.hlen(keys.DEATHS) == 0
    assert leased(redis_client) == 0
    left = len(queued_ids(redis_client, submitted.list_key))
    assert left == 30 - now(store).number("completed") >= 20
