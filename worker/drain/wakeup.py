"""Wakes the drain's loop after a change in this process, or for a message in an empty queue."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from redis import exceptions

from contract.redis.client import AsyncClient, translated
from worker.drain.scripts import ERRORS

log = logging.getLogger(__name__)

#: Seconds of pause after a call that Redis did not answer.
REDIS_PAUSE_S = 0.25
#: Seconds between two polls of a Redis that does not push.
POLL_S = 0.25
#: Seconds of polling until CLIENT TRACKING is tried again: the user's ACL or the server may change.
POLLING_S = 60.0
#: Calls of `Arrivals.wait` in a row that may return immediately because a key existed already.
#: Later ones pause for POLL_S first, so that a caller does not use a whole core while messages stay
#: in the queue.
QUICK_CALLS = 3


class Wakeup:
    """The event for which the drain's loop waits when it has no work."""

    def __init__(self, wait_for_message: Callable[[], Awaitable[bool]]) -> None:
        self._wait_for_message = wait_for_message
        self._changed = asyncio.Event()
        #: Set while the loop waits for a message.
        self.queue_empty = asyncio.Event()

    def poke(self) -> None:
        """Let the loop check for work again."""
        self._changed.set()

    def clear(self) -> None:
        """Forget earlier pokes; the loop calls this before it checks for work."""
        self._changed.clear()

    async def wait(self, at_most_s: float = math.inf, *, queue_empty: bool = False) -> None:
        """Wait for a poke after `clear`, and with an empty queue also for a message."""
        if queue_empty:
            self.queue_empty.set()
        if at_most_s == math.inf:
            await self._changed.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()

    async def run(self) -> None:
        """Wait for messages until cancelled, on a separate connection."""
        while True:
            await self.queue_empty.wait()
            try:
                if await self._wait_for_message():
                    self.queue_empty.clear()
                    self._changed.set()
            except ERRORS:
                await asyncio.sleep(REDIS_PAUSE_S)


class Arrivals:
    """Waits on its own connection until one of `keys` exists; only one task may use it.

    With CLIENT TRACKING (Redis 6.0, RESP3) Redis pushes a message when any command or script writes
    a key that this connection has read. If that key did not exist, it has been created.
    """

    def __init__(self, client: AsyncClient, keys: Sequence[str], *, warns: bool = True) -> None:
        """Prepare to watch `keys` in the Redis of `client`, without a connection yet.

        `warns`: log a warning if Redis does not push, so that it is polled.
        """
        self._client = client
        self._keys = keys
        self._connection: Any = None
        self._polls_until = 0.0
        self._warned = not warns
        self._quick_calls = 0

    async def wait(self, timeout_s: float) -> bool:
        """Wait until a key exists; return False if none exists after `timeout_s`.

        Raises:
            StoreUnavailable: Redis does not answer; the next call connects again.
        """
        if self._quick_calls >= QUICK_CALLS:
            await asyncio.sleep(POLL_S)
        try:
            if time.monotonic() < self._polls_until or not await self._track():
                await asyncio.sleep(POLL_S)
                return bool(await self._client.exists(*self._keys))
            pushed = await self._connection.can_read()  # a push since the last call
            # EXISTS finds keys that were there before; a push reports keys written after EXISTS.
            exists = await self._any_exists()
            self._quick_calls = self._quick_calls + 1 if exists and not pushed else 0
            if exists:
                return True
            # This returns after a push or `timeout_s`; the next EXISTS also tests the connection.
            await self._connection.read_response(timeout=timeout_s, push_request=True)
            return await self._any_exists()
        except (exceptions.RedisError, OSError) as error:
            await self.close()
            raise translated(error) from error

    async def _any_exists(self) -> bool:
        await self._connection.send_command("EXISTS", *self._keys)
        return bool(await self._connection.read_response())

    async def _track(self) -> bool:
        """Connect with CLIENT TRACKING, unless connected; return False if Redis refuses it."""
        if self._connection and self._connection.is_connected:
            return True
        pool: Any = self._client.connection_pool
        self._connection = pool.make_connection()
        await self._connection.connect()
        try:
            if self._connection.get_protocol() != 3:
                raise exceptions.ResponseError("WARMQ_REDIS_URL has protocol=2; remove it")
            await self._connection.send_command("CLIENT", "TRACKING", "ON")
            await self._connection.read_response()
        except exceptions.ResponseError as error:
            await self.close()
            self._polls_until = time.monotonic() + POLLING_S
            if not self._warned:
                self._warned = True
                log.warning(
                    "an idle worker polls Redis for new messages every %g s, because CLIENT "
                    "TRACKING does not work: %s. Tracking needs Redis 6.0 or later, and a user "
                    "with the ACL permission +client|tracking",
                    POLL_S,
                    error,
                    extra={"action": "polls"},
                )
            return False
        return True

    async def close(self) -> None:
        """Close the connection; a later call of `wait` opens a new one."""
        connection, self._connection = self._connection, None
        if connection:
            await connection.disconnect(nowait=True)
