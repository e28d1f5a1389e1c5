"""Who is logged in at the gateways' page: a session's digest -> the digest of its key."""

from __future__ import annotations

import hashlib
from typing import Any, Self

from contract.redis.client import AsyncClient
from contract.redis.connect import connect_async
from gateway.redis.riding_out import ride_out

#: A session ends so long after its login; whoever still looks logs in again.
LIFE_S = 24 * 3600


class Sessions:
    """Sessions in one Redis, for one event loop. Raises StoreUnavailable if Redis is away.

    Neither a session's token nor a key is kept: who reads Redis can use neither.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @classmethod
    def open(cls, url: str, name: str) -> Self:
        """Return the sessions in the Redis behind a URL; it is connected to when first asked."""
        return cls(connect_async(url, name))

    async def begin(self, token: str, key_digest: str) -> None:
        """Remember that a token stands for a key."""
        args = (_digest(token), key_digest, LIFE_S)
        await ride_out(self._client, lambda: self._client.run_script("session_put", *args))

    async def key_digest(self, token: str) -> str:
        """Return the digest of the key that a token stands for; '' if it has none (any more)."""
        found: bytes | None = await self._run("get", _name(token))
        return found.decode() if found else ""

    async def end(self, token: str) -> None:
        """Forget a token."""
        await self._run("del", _name(token))

    async def _run(self, *command: Any) -> Any:
        return await ride_out(self._client, lambda: self._client.execute_command(*command))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _name(token: str) -> str:
    return f"warmq:gateway:session:{_digest(token)}"
