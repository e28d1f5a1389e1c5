"""Waits on one connection for any of some keys to exist: for messages in lists that are empty.

Redis tells of it by itself (client-side caching, Redis 6.0 and later, RESP3): a connection with
CLIENT TRACKING on is sent a push when a key that it has read is written, by whatever command or
script. A key that did not exist when it was read can only have come into being.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from redis import exceptions

from contract.redis.client import AsyncClient, translated

log = logging.getLogger(__name__)

#: Seconds between two looks where Redis does not tell.
POLL_S = 0.25
#: Seconds of looks until tracking is tried again: rights and servers change.
POLLING_S = 60.0
#: So many calls in a row that find a key which nobody has written since are answered at once.
#: Those after them are answered after POLL_S: nobody takes what is there, and whoever calls
#: must not spin.
AT_ONCE = 3


class Arrivals:
    """Hears of keys that come into being. For one task: its connection is not shared."""

    def __init__(self, client: AsyncClient, keys: Sequence[str]) -> None:
        """Prepare to watch `keys` where `client` connects to; nothing is connected yet."""
        self._client = client
        self._keys = keys
        self._connection: Any = None
        self._polls_until = 0.0
        self._said = False
        self._in_vain = 0

    async def wait(self, timeout_s: float) -> bool:
        """Return whether any key exists, once one does, or after `timeout_s` of none.

        Raises:
            StoreUnavailable: Redis cannot be asked; the next call connects anew.
        """
        if self._in_vain >= AT_ONCE:
            await asyncio.sleep(POLL_S)
        try:
            if time.monotonic() < self._polls_until or not await self._track():
                await asyncio.sleep(POLL_S)
                return bool(await self._client.exists(*self._keys))
            told = await self._connection.can_read()  # pushes since the last look
            # What is written before this look is found by it, what is written after it is told.
            found = await self._any()
            self._in_vain = self._in_vain + 1 if found and not told else 0
            if found:
                return True
            # Returns at a push, and at nothing within the time. The look after it is also the
            # question whether the connection still lives.
            await self._connection.read_response(timeout=timeout_s, push_request=True)
            return await self._any()
        except (exceptions.RedisError, OSError) as error:
            await self.close()
            raise translated(error) from error

    async def _any(self) -> bool:
        await self._connection.send_command("EXISTS", *self._keys)
        return bool(await self._connection.read_response())

    async def _track(self) -> bool:
        """Connect, unless connected, and have Redis tell; False if it refuses to."""
        if self._connection and self._connection.is_connected:
            return True
        pool: Any = self._client.connection_pool
        self._connection = pool.make_connection()
        await self._connection.connect()
        try:
            if self._connection.get_protocol() != 3:
                raise exceptions.ResponseError("WARMQ_REDIS_URL says protocol=2, it takes 3")
            await self._connection.send_command("CLIENT", "TRACKING", "ON")
            await self._connection.read_response()
        except exceptions.ResponseError as error:
            await self.close()
            self._polls_until = time.monotonic() + POLLING_S
            if not self._said:
                self._said = True
                log.warning(
                    "an idle worker asks Redis for new messages every %g s, for Redis does not "
                    "tell it of them: CLIENT TRACKING: %s. It does from version 6.0 on, to a user "
                    "with the right client|tracking",
                    POLL_S,
                    error,
                    extra={"action": "polls"},
                )
            return False
        return True

    async def close(self) -> None:
        """Close the connection; a later call of `wait` opens another."""
        connection, self._connection = self._connection, None
        if connection:
            await connection.disconnect(nowait=True)
