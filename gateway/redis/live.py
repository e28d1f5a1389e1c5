"""Online requests in Redis, for one event loop: queue them, hear their answers, cancel them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import orjson

from contract import naming
from contract.redis import keys
from contract.redis.announcements import read_announcements
from contract.redis.client import AsyncClient
from contract.redis.connect import connect_async
from gateway.redis.subscription import Subscription

#: How long a cancellation is remembered for requests that still wait in their list, in seconds;
#: their own deadlines end before.
CANCEL_KEEP_S = 7200


class Push(NamedTuple):
    """A request to be queued; with `once_ms` once, however often it is pushed within that time."""

    list_key: str
    request_id: str
    once_ms: int | None
    message: bytes


class Queued(NamedTuple):
    """What became of a push: `known` it was queued before, `meta` is its stored result, `full` why
    it was refused. Of one that was queued now, none is set."""

    known: bool = False
    meta: bytes = b""
    full: str = ""


class LiveRequests:
    """Online requests in one Redis. Each call raises StoreUnavailable where it cannot be used."""

    def __init__(self, url: str, name: str) -> None:
        """Prepare; nothing is connected yet. Redis shows the connections under `name`."""
        self._client: AsyncClient = connect_async(url, name)

    async def push(
        self, requests: Sequence[Push], *, high_water: float, high_water_requests: int
    ) -> list[Queued]:
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

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


def _queued(reply: int | bytes) -> Queued:
    if isinstance(reply, int):
        return Queued(known=not reply)
    return Queued(meta=reply) if reply.startswith(b"{") else Queued(full=reply.decode())
