"""Calls of an event loop that ride out a Redis that restarts; each may be made twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from contract.errors import StoreUnreachable
from contract.redis.client import AsyncClient

T = TypeVar("T")
#: Before each further try, in seconds: the first is for connections that a restart left stale.
WAITS_S = (0.0, 0.1, 0.4, 1.0)


async def ride_out(client: AsyncClient, call: Callable[[], Awaitable[T]]) -> T:
    """Return what a call returns; try again for a second and a half if there is no connection.

    Raises:
        StoreUnavailable: of the last try, or any but StoreUnreachable of the first.
    """
    for wait_s in WAITS_S:
        try:
            return await call()
        except StoreUnreachable:
            await client.connection_pool.disconnect(inuse_connections=False)
            await asyncio.sleep(wait_s)
    return await call()
