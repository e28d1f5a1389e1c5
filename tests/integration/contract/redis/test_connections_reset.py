"""A connection to Redis that is reset: under uvloop, which the gateway runs on, writing to it is a
RuntimeError. Every call says StoreUnreachable, as for other lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from contract.errors import StoreUnreachable
from contract.redis.client import AsyncClient
from contract.redis.connect import connect_async
from demo.stack import RedisServer
from gateway.online.pending import PendingRequests
from gateway.redis.api_keys import KeyLookup, Sessions
from gateway.redis.idempotency import IdempotencyStore
from gateway.redis.limits import Rates, Take
from gateway.redis.online import OnlineRequests, Subscription
from gateway.settings import GatewaySettings
from worker.drain.wakeup import Arrivals

Call = Callable[[AsyncClient], Awaitable[Any]]


def resets(client: AsyncClient) -> None:
    """Have each new connection of a client reset before anything was sent on it."""
    pool: Any = client.connection_pool
    made = pool.connection_class

    async def reset_first(self: Any, **options: Any) -> None:
        self._writer.transport.abort()
        await asyncio.sleep(0)  # the loop closes the socket
        await made.on_connect_check_health(self, **options)

    pool.connection_class = type("Reset", (made,), {"on_connect_check_health": reset_first})


async def piped(client: AsyncClient) -> None:
    pipe = client.pipeline(transaction=False)
    pipe.get("a")
    await pipe.execute()


CALLS: dict[str, Call] = {
    "command": lambda client: client.get("a"),
    "script": lambda client: client.run_script("list", "x", 1, 1),
    "pipeline": piped,
    "subscription": lambda client: Subscription(client, ["a*"], ["b"]).open(),
    "arrivals": lambda client: Arrivals(client, ["a"]).wait(5),
    "key": lambda client: KeyLookup(client).find(["digest"]),
    "session": lambda client: Sessions(client).key_digest("token"),
    "rate": lambda client: Rates(client).take([Take("a", 1, 1, 1, 1)]),
    "try": lambda client: IdempotencyStore(client).forget("a", "b"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_connection_that_is_reset_while_it_is_opened_is_an_unreachable_store(
    redis_url: str, name: str
) -> None:
    async def call() -> None:
        client = connect_async(redis_url, "reset")
        resets(client)
        with pytest.raises(StoreUnreachable):
            await CALLS[name](client)
        await client.aclose()

    uvloop.run(call())


def test_a_subscription_whose_connection_is_reset_is_an_unreachable_store(redis_url: str) -> None:
    async def call() -> None:
        client = connect_async(redis_url, "reset")
        subscription = Subscription(client, [], ["a"])
        await subscription.open()
        subscription._connection._writer.transport.abort()
        await asyncio.sleep(0)
        with pytest.raises(StoreUnreachable):
            await subscription.unsubscribe("a")
        with pytest.raises(StoreUnreachable):
            await asyncio.wait_for(subscription.subscribe("b"), 5)
        await subscription.close()
        await client.aclose()

    uvloop.run(call())


@pytest.mark.parametrize("ask", ["subscribe", "unsubscribe"])
def test_a_subscription_that_is_closed_while_it_asks_is_an_unreachable_store(
    redis_url: str, ask: str
) -> None:
    async def call() -> None:
        client = connect_async(redis_url, "reset")
        subscription = Subscription(client, [], ["a"])
        await subscription.open()
        connection, closed = subscription._connection, asyncio.Event()
        write = connection._send_packed_command

        async def write_when_closed(command: Any) -> None:
            await closed.wait()
            await write(command)

        connection._send_packed_command = write_when_closed
        asking = asyncio.create_task(getattr(subscription, ask)("a"))
        await asyncio.sleep(0)  # it has looked at the connection, and not written yet
        await subscription.close()
        closed.set()
        with pytest.raises(StoreUnreachable):
            await asyncio.wait_for(asking, 5)
        await client.aclose()

    uvloop.run(call())


def test_results_are_heard_again_however_often_the_connection_is_lost(own: RedisServer) -> None:
    client = own.client()

    async def call() -> None:
        live = OnlineRequests.open(own.url, "reset")
        waiting = PendingRequests(live, GatewaySettings(_env_file=None, redis_url=own.url))
        hearing = asyncio.create_task(waiting.run())
        before = None
        for _ in range(3):
            async with asyncio.timeout(10):
                while waiting._subscription in (None, before):
                    assert not hearing.done()
                    await asyncio.sleep(0.01)
            before = waiting._subscription
            client.client_kill_filter(_type="pubsub")
        hearing.cancel()
        await asyncio.wait([hearing])
        assert hearing.cancelled()
        await live.close()

    uvloop.run(call())


def test_another_runtime_error_stays_one(redis_url: str) -> None:
    async def call() -> None:
        client = connect_async(redis_url, "reset")
        pool: Any = client.connection_pool
        connection = pool.make_connection()
        await connection.connect()

        async def fail(*_: Any) -> None:
            raise RuntimeError("a fault of our own")

        connection._send_packed_command = fail
        with pytest.raises(RuntimeError, match="of our own"):
            await connection.send_command("PING")
        await client.aclose()

    uvloop.run(call())
