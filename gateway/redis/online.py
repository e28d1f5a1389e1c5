"""Pushes and cancels online requests in Redis, and receives their results."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import orjson
from redis import exceptions

from contract import naming
from contract.redis import keys
from contract.redis.announcements import read_announcements
from contract.redis.client import AsyncClient, translated
from gateway.redis.async_calls import AsyncCalls

#: Seconds for which the cancellation of a waiting request is stored. Its deadline is earlier.
CANCEL_KEEP_S = 7200


class Push(NamedTuple):
    """A request to queue; with `once_ms` it is queued only once within that time."""

    list_key: str
    request_id: str
    once_ms: int | None
    message: bytes


class PushResult(NamedTuple):
    """The outcome of a push; all fields are empty if the request was queued now.

    `known`: it was queued before. `meta`: its stored result. `full`: why the queue is full.
    """

    known: bool = False
    meta: bytes = b""
    full: str = ""


class OnlineRequests(AsyncCalls):
    """Calls for online requests. They are not retried: if Redis is unreachable, they fail."""

    async def push(
        self, requests: Sequence[Push], *, high_water: float, high_water_requests: int
    ) -> list[PushResult]:
        args: list[Any] = [high_water_requests, high_water]
        for push in requests:
            once_ms = "" if push.once_ms is None else push.once_ms
            args += (push.list_key, push.request_id, once_ms, push.message)
        return [_result(reply) for reply in await self._client.run_script("push", *args)]

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Cancel requests that wait or run."""
        await self._client.run_script("revoke", CANCEL_KEEP_S, *request_ids)
        await self._client.publish(keys.CANCEL_CHANNEL, orjson.dumps(list(request_ids)))

    async def results(self, request_ids: Sequence[str]) -> list[bytes | None]:
        results: list[bytes | None] = []
        for start in range(0, len(request_ids), 500):
            part = request_ids[start : start + 500]
            raws: Any = await self._client.mget([keys.result_key(i) for i in part])
            results += raws
        return results

    async def workers(self) -> tuple[list[dict[str, Any]], float]:
        """Return the announced states of all workers, even dead ones, and Redis's time."""
        pipe: Any = self._client.pipeline(transaction=False)
        raw, (now_s, micros) = await pipe.hgetall(keys.WORKERS).time().execute()
        return read_announcements(raw, now_s), now_s + micros / 1e6

    async def announce(self, text: bytes) -> None:
        """Publish to workers which requests have a listener (contract/streaming.py)."""
        await self._client.publish(naming.LISTEN_CHANNEL, text)

    def subscription(self, patterns: Iterable[str], channels: Iterable[str]) -> Subscription:
        return Subscription(self._client, list(patterns), list(channels))

    async def reconnect(self) -> None:
        """Close the idle connections, which a restart of Redis has broken."""
        await self._client.connection_pool.disconnect(inuse_connections=False)


def _result(reply: int | bytes) -> PushResult:
    if isinstance(reply, int):
        return PushResult(known=not reply)
    if reply.startswith(b"{"):
        return PushResult(meta=reply)
    return PushResult(full=reply.decode())


#: Seconds of silence after which a connection gets a PING; after as many more it is closed.
SILENT_S = 10.0
_LOST = "connection lost"


class Subscription:
    """One connection that receives the messages of patterns and channels.

    redis-py's PubSub is not used: it takes four times as long for a message, and formats each one
    for the log.
    """

    def __init__(self, client: AsyncClient, patterns: list[str], channels: list[str]) -> None:
        self._client = client
        self._patterns, self._channels = patterns, channels
        self._connection: Any = None
        self._confirmed: dict[bytes, asyncio.Future[None]] = {}
        self._active = True

    async def open(self) -> None:
        """Connect, and return once everything published from now on is received."""
        pool: Any = self._client.connection_pool
        self._connection = pool.make_connection()
        try:
            await self._connection.connect()
            self._connection._parser.set_pubsub_push_handler(_pass_on)
            expected = len(self._patterns) + len(self._channels)
            if self._patterns:
                await self._connection.send_command("PSUBSCRIBE", *self._patterns)
            if self._channels:
                await self._connection.send_command("SUBSCRIBE", *self._channels)
            for _ in range(expected):
                await self._connection.read_response(push_request=True)
        except (exceptions.RedisError, OSError) as error:
            await self.close()
            raise translated(error) from error

    async def subscribe(self, channel: str) -> None:
        """Add a channel; return once Redis has confirmed it. `receive` must be running."""
        confirmed = self._confirmed.setdefault(
            channel.encode(), asyncio.get_running_loop().create_future()
        )
        await self._send("SUBSCRIBE", channel)
        await asyncio.shield(confirmed)

    async def unsubscribe(self, channel: str) -> None:
        await self._send("UNSUBSCRIBE", channel)

    async def _send(self, *words: str) -> None:
        try:
            # redis-py would reconnect by itself, without the other channels.
            if self._connection is None or not self._connection.is_connected:
                raise exceptions.ConnectionError(_LOST)
            await self._connection.send_command(*words)
        except (exceptions.RedisError, OSError) as error:
            raise translated(error) from error

    async def receive(self, handle: Callable[[bytes, bytes], None]) -> None:
        """Call `handle` with channel and data of each message, until the connection is lost."""
        checking = asyncio.create_task(self._check())
        read = self._connection.read_response
        try:
            while True:
                reply = await read(timeout=math.inf, push_request=True)
                self._active = True
                if not isinstance(reply, list):
                    continue  # the answer to a PING
                kind = reply[0]
                if kind == b"pmessage":
                    handle(reply[2], reply[3])
                elif kind == b"message":
                    handle(reply[1], reply[2])
                elif kind == b"subscribe":
                    self._confirm(reply[1])
        except (exceptions.RedisError, OSError) as error:
            raise translated(error) from error
        finally:
            checking.cancel()
            await self.close()

    def _confirm(self, channel: bytes) -> None:
        confirmed = self._confirmed.pop(channel, None)
        if confirmed and not confirmed.done():
            confirmed.set_result(None)

    async def _check(self) -> None:
        """Close a connection on which a PING is not answered."""
        while True:
            await asyncio.sleep(SILENT_S)
            if not self._active:
                self._active = True
                await self._connection.disconnect(nowait=True)
                return
            self._active = False
            try:
                await self._connection.send_command("PING")
            except (exceptions.RedisError, OSError):  # `receive` raises it
                return

    async def close(self) -> None:
        """Close the connection; calls of `subscribe` that still wait raise StoreUnavailable."""
        connection, self._connection = self._connection, None
        for confirmed in self._confirmed.values():
            if not confirmed.done():
                confirmed.set_exception(translated(exceptions.ConnectionError(_LOST)))
        self._confirmed.clear()
        if connection:
            await connection.disconnect(nowait=True)


async def _pass_on(response: Any) -> Any:
    return response
