"""The one connection on which an idle worker hears of messages, wherever they are put."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from kit.drain.draining import draining, soon
from kit.protocol.lessee import QUEUE, celery_message, stored

from contract import naming
from contract.errors import StoreUnavailable
from contract.redis.connect import connect_async
from demo.stack import RedisServer
from worker.drain import wakeup
from worker.drain.lifecycle import State
from worker.drain.wakeup import Arrivals

KEYS = naming.keys_with_work(QUEUE)
#: Seconds of a wait that a test expects to end by a message.
LONG_S = 20.0


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis of this test's own."""
    with RedisServer(tmp_path / "redis", "--appendonly", "no") as server:
        yield server


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[Arrivals]:
    """Return what waits for messages of the queue; its connection is closed after the block."""
    client = connect_async(url, "watching")
    watch = Arrivals(client, KEYS)
    try:
        yield watch
    finally:
        await watch.close()
        await client.aclose()


def heard_of(client: redis.Redis) -> list[dict[str, Any]]:
    """Return the connections that Redis tells of keys."""
    return [c for c in client.client_list() if "t" in c["flags"]]


def listening(client: redis.Redis) -> bool:
    """Say whether one connection has looked, and waits."""
    found = heard_of(client)
    return len(found) == 1 and found[0]["cmd"] == "exists"


async def woken_by(client: redis.Redis, watch: Arrivals, write: Any) -> float:
    """Return seconds from a write to the wake-up of a watch that was waiting."""
    waiting = asyncio.create_task(watch.wait(LONG_S))
    await soon(lambda: listening(client))
    began = time.monotonic()
    write()
    assert await waiting
    return time.monotonic() - began


@pytest.mark.parametrize("step", naming.PRIORITY_STEPS)
async def test_a_push_to_any_of_kombus_lists_is_heard_at_once(
    redis_client: redis.Redis, redis_url: str, step: int
) -> None:
    key = naming.priority_list(QUEUE, step)
    async with watching(redis_url) as watch:
        assert await woken_by(redis_client, watch, lambda: redis_client.lpush(key, "m")) < 1


@pytest.mark.parametrize("step", naming.PRIORITY_STEPS)
async def test_a_scripts_write_to_any_ring_is_heard_at_once(
    redis_client: redis.Redis, redis_url: str, step: int
) -> None:
    script = "return redis.call('ZADD', ARGV[1], 1, 'tenant')"

    def write() -> None:
        redis_client.eval(script, 0, naming.turns_key(QUEUE, step))

    async with watching(redis_url) as watch:
        assert await woken_by(redis_client, watch, write) < 1


async def test_what_is_there_already_is_found(redis_client: redis.Redis, redis_url: str) -> None:
    redis_client.lpush(QUEUE, "m")
    async with watching(redis_url) as watch:
        assert await asyncio.wait_for(watch.wait(LONG_S), 5)


async def test_each_of_many_messages_is_heard(redis_client: redis.Redis, redis_url: str) -> None:
    taker = connect_async(redis_url, "taker")
    async with watching(redis_url) as watch:
        began = time.monotonic()
        for n in range(200):
            waiting = asyncio.create_task(watch.wait(LONG_S))
            for _ in range(n % 8):  # written at another moment of the watch's course each time
                await asyncio.sleep(0)
            redis_client.lpush(QUEUE, "m")
            assert await asyncio.wait_for(waiting, 5)
            await taker.delete(QUEUE)
        assert time.monotonic() - began < 10  # none waited for a look at the clock
    await taker.aclose()


async def test_other_keys_wake_nobody(redis_client: redis.Redis, redis_url: str) -> None:
    async with watching(redis_url) as watch:
        waiting = asyncio.create_task(watch.wait(0.5))
        await soon(lambda: listening(redis_client))
        for key in (f"{QUEUE}2", f"{QUEUE}:suspects", "warmq:turns:other\x060"):
            redis_client.lpush(key, "m")
        before = redis_client.info("commandstats")["cmdstat_exists"]["calls"]
        assert not await waiting
        assert redis_client.info("commandstats")["cmdstat_exists"]["calls"] == before + 1


async def test_an_idle_drain_is_not_woken_while_nothing_happens(own: RedisServer) -> None:
    with own.client() as client:
        async with draining(own.url, side_tasks=False) as running:
            await soon(lambda: running.drain.wakeup.queue_empty.is_set() and listening(client))
            client.config_resetstat()
            await asyncio.sleep(1.5)
            assert client.info("commandstats").get("cmdstat_evalsha") is None


async def test_an_idle_drain_has_one_connection_for_all_its_lists(own: RedisServer) -> None:
    with own.client() as client:
        async with draining(own.url, side_tasks=False) as running:
            await soon(lambda: running.drain.wakeup.queue_empty.is_set() and listening(client))
            named = [c for c in client.client_list() if c["name"].startswith("warmq-")]
            assert len(named) == 2  # it, and the one of the scripts
            assert client.info("clients")["blocked_clients"] == 0


async def test_a_key_that_nobody_takes_from_makes_no_busy_loop(
    redis_client: redis.Redis, redis_url: str
) -> None:
    redis_client.zadd(naming.turns_key(QUEUE, 0), {"tenant": 1})
    async with watching(redis_url) as watch:
        found, until = 0, time.monotonic() + 1
        while time.monotonic() < until:
            found += await watch.wait(LONG_S)
        assert wakeup.QUICK_CALLS < found <= wakeup.QUICK_CALLS + 1 / wakeup.POLL_S


async def test_the_watch_outlives_its_connection(own: RedisServer) -> None:
    with own.client() as client:
        async with draining(own.url, side_tasks=False) as running:
            await soon(lambda: running.state is State.READY)
            for n in range(3):
                await soon(lambda: listening(client))
                client.client_kill_filter(_id=heard_of(client)[0]["id"])
                await soon(lambda: listening(client))
                client.lpush(QUEUE, celery_message(f"t{n}"))
                await soon(lambda n=n: stored(client, f"t{n}"))


async def test_an_outage_is_told_and_the_next_wait_connects_anew(own: RedisServer) -> None:
    async with watching(own.url) as watch:
        assert not await watch.wait(0.01)
        own.stop()
        with pytest.raises(StoreUnavailable):
            await watch.wait(LONG_S)
        own.start()
        with own.client() as client:
            assert await woken_by(client, watch, lambda: client.lpush(QUEUE, "m")) < 1


async def test_messages_are_heard_of_over_a_socket_file(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    with (
        RedisServer(tmp_path / "redis", "--unixsocket", str(socket)) as server,
        server.client() as client,
    ):
        async with watching(f"unix://{socket}?db=3") as watch:
            other = redis.Redis(port=server.port, db=3)
            assert await woken_by(client, watch, lambda: other.lpush(QUEUE, "m")) < 1
            other.close()


async def test_without_the_right_to_be_told_redis_is_asked(
    own: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with own.client() as client:
        rules = ["on", ">pw", "~warmq*", "+@all", "-client|tracking"]
        if int(client.info("server")["redis_version"].split(".")[0]) < 7:  # cannot take one away
            rules[-1:] = ["-client", "+client|setname"]
        client.execute_command("ACL", "SETUSER", "worker", *rules)
        url = own.url.replace("redis://", "redis://worker:pw@")
        with caplog.at_level(logging.WARNING):
            async with watching(url) as watch:
                for _ in range(3):
                    client.delete(QUEUE)
                    assert not await watch.wait(LONG_S)
                    client.lpush(QUEUE, "m")
                    assert await watch.wait(LONG_S)
                assert heard_of(client) == []
    said = [record for record in caplog.records if "client|tracking" in record.message]
    assert len(said) == 1


async def test_where_a_url_chooses_the_older_protocol_redis_is_asked(
    redis_client: redis.Redis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(f"{redis_url}?protocol=2") as watch:
        assert not await watch.wait(LONG_S)
        redis_client.lpush(QUEUE, "m")
        assert await watch.wait(LONG_S)
    assert "protocol=2" in caplog.text


async def test_of_several_idle_drains_all_hear_and_one_has_the_message(own: RedisServer) -> None:
    with own.client() as client:
        async with (
            draining(own.url, side_tasks=False) as one,
            draining(own.url, side_tasks=False) as two,
        ):
            drains = [running.drain for running in (one, two)]
            for n in range(20):
                await soon(lambda: all(d.wakeup.queue_empty.is_set() for d in drains))
                client.lpush(QUEUE, celery_message(f"t{n}"))
                await soon(lambda n=n: stored(client, f"t{n}"))
            await soon(lambda: sum(d.counts.ended for d in drains) == 20)
