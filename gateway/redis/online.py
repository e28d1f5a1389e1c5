"""Online requests in Redis, for one event loop: queue them, hear what is published, cancel them."""

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

#: How long a cancellation is remembered for requests that still wait in their list, in seconds;
#: their own deadlines end before.
CANCEL_KEEP_S = 7200


class Push(NamedTuple):
    """A request to be queued; with `once_ms` once, however often it is pushed within that time."""

    list_key: str
    request_id: str
    once_ms: int | None
    message: bytes


class PushResult(NamedTuple):
    """What became of a push: `known` it was queued before, `meta` is its stored result, `full` why
    it was refused. Of one that was queued now, none is set."""

    known: bool = False
    meta: bytes = b""
    full: str = ""


class OnlineRequests(AsyncCalls):
    """Online requests. No call is made twice: whoever asks is told that Redis is away."""

    async def push(
        self, requests: Sequence[Push], *, high_water: float, high_water_requests: int
    ) -> list[PushResult]:
        """Queue requests of one moment, all in one call."""
        args: list[Any] = [high_water_requests, high_water]
        for r in requests:
            args += (r.list_key, r.request_id, "" if r.once_ms is None else r.once_ms, r.message)
        return [_queued(reply) for reply in await self._client.run_script("push", *args)]

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Cancel requests, wherever they are."""
        await self._client.run_script("revoke", CANCEL_KEEP_S, *request_ids)
        await self._client.publish(keys.CANCEL_CHANNEL, orjson.dumps(list(request_ids)))

    async def results(self, request_ids: Sequence[str]) -> list[bytes | None]:
        """Return stored results, None where there is none (yet)."""
        found: list[bytes | None] = []
        for start in range(0, len(request_ids), 500):
            part = request_ids[start : start + 500]
            raws: Any = await self._client.mget([keys.result_key(i) for i in part])
            found += raws
        return found

    async def workers(self) -> tuple[list[dict[str, Any]], float]:
        """Return the announcements of all workers, also of dead ones, and Redis' time in s."""
        pipe: Any = self._client.pipeline(transaction=False)
        raw, (now_s, micros) = await pipe.hgetall(keys.WORKERS).time().execute()
        return read_announcements(raw, now_s), now_s + micros / 1e6

    async def announce(self, text: bytes) -> None:
        """Tell workers who listens to which requests (contract/streaming.py)."""
        await self._client.publish(naming.LISTEN_CHANNEL, text)

    def subscription(self, patterns: Iterable[str], channels: Iterable[str]) -> Subscription:
        """Return what hears of these patterns and channels; nothing is connected yet."""
        return Subscription(self._client, list(patterns), list(channels))

    async def reconnect(self) -> None:
        """Use none of the idle connections again: Redis has been away."""
        await self._client.connection_pool.disconnect(inuse_connections=False)


def _queued(reply: int | bytes) -> PushResult:
    if isinstance(reply, int):
        return PushResult(known=not reply)
    return PushResult(meta=reply) if reply.startswith(b"{") else PushResult(full=reply.decode())


#: A connection that is silent for so long is asked for a sign of life, and given up after as long
#: again, in seconds.
SILENT_S = 10.0


class Subscription:
    """One connection on which messages of patterns and channels arrive.

    redis-py's own PubSub takes four times as long for a message, and writes each into a text for
    the log.
    """

    def __init__(self, client: AsyncClient, patterns: list[str], channels: list[str]) -> None:
        self._client = client
        self._patterns, self._channels = patterns, channels
        self._connection: Any = None
        self._confirmed: dict[bytes, asyncio.Future[None]] = {}
        self._heard_anything = True

    async def open(self) -> None:
        """Connect, and return once everything published from now on will be heard."""
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
        """Hear of one more channel; returns once that is so. `receive` must be running."""
        confirmed = self._confirmed.setdefault(
            channel.encode(), asyncio.get_running_loop().create_future()
        )
        await self._send("SUBSCRIBE", channel)
        await asyncio.shield(confirmed)

    async def unsubscribe(self, channel: str) -> None:
        """Hear of a channel no more."""
        await self._send("UNSUBSCRIBE", channel)

    async def _send(self, *words: str) -> None:
        try:
            # redis-py would connect anew by itself, and hear of nothing but this.
            if self._connection is None or not self._connection.is_connected:
                raise exceptions.ConnectionError("connection lost")
            await self._connection.send_command(*words)
        except (exceptions.RedisError, OSError) as error:
            raise translated(error) from error

    async def receive(self, heard: Callable[[bytes, bytes], None]) -> None:
        """Call `heard` with channel and data of each message, until the connection is lost."""
        checking = asyncio.create_task(self._check())
        read = self._connection.read_response
        try:
            while True:
                told = await read(timeout=math.inf, push_request=True)
                self._heard_anything = True
                if not isinstance(told, list):
                    continue  # the answer to a PING
                kind = told[0]
                if kind == b"pmessage":
                    heard(told[2], told[3])
                elif kind == b"message":
                    heard(told[1], told[2])
                elif kind == b"subscribe":
                    self._confirm(told[1])
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
        """Give up a connection on which not even a PING is answered."""
        while True:
            await asyncio.sleep(SILENT_S)
            if not self._heard_anything:
                self._heard_anything = True
                await self._connection.disconnect(nowait=True)
                return
            self._heard_anything = False
            try:
                await self._connection.send_command("PING")
            except (exceptions.RedisError, OSError):  # `receive` is told so, too
                return

    async def close(self) -> None:
        """Close the connection; whoever waits for `subscribe` is told."""
        connection, self._connection = self._connection, None
        for confirmed in self._confirmed.values():
            if not confirmed.done():
                confirmed.set_exception(translated(exceptions.ConnectionError("connection lost")))
        self._confirmed.clear()
        if connection:
            await connection.disconnect(nowait=True)


async def _pass_on(response: Any) -> Any:
    return response
