"""The worker's connection to Redis, and how a script is run over it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from contract.errors import StoreRefused, StoreUnavailable
from contract.redis.connect import connect_async, is_final, is_read_only
from contract.redis.scripts import source
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

ERRORS = (RedisError, OSError)
#: Redis cannot be told to take less than this in one value (proto-max-bulk-len).
ALWAYS_TAKEN_BYTES = 2**20
#: What it takes if nobody has told it otherwise, and the worker may not ask.
USUALLY_TAKEN_BYTES = 512 * 2**20
#: So often a connection may break under the same large write, on a Redis that answers a PING,
#: before Redis is taken to refuse it.
BROKEN_TIMES = 3


class Scripts:
    """Runs the scripts of contract/lua in one Redis, for one worker."""

    def __init__(self, settings: WorkerSettings, worker_id: str) -> None:
        self.worker_id = worker_id
        self.queue = settings.queue_to_drain
        self.errors = 0
        self.settings = settings
        url = settings.redis_url.get_secret_value()
        # redis-py types every reply as bytes or str or more; this client never decodes.
        self.redis: Any = connect_async(url, f"warmq-{worker_id}", settings.redis_timeout_s)
        self._script = cache(lambda name: self.redis.register_script(source(name)))
        self._give_up_at = math.inf

    def give_up_in(self, seconds: float) -> None:
        """Stop trying to write after so many seconds: the process wants to end."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + seconds)

    async def run(self, name: str, *args: Any) -> Any:
        """Run a script once. Raises RedisError or OSError if Redis does not answer."""
        try:
            return await self._script(name)(args=args)
        except ERRORS as error:
            if is_read_only(error):
                # This server has become a replica: a new connection may find the primary.
                await self.redis.connection_pool.disconnect(inuse_connections=False)
            raise

    async def until_done(self, name: str, *args: Any) -> Any:
        """Run a script, again and again while Redis is away.

        Raises:
            StoreRefused: Redis would refuse it at any time.
            StoreUnavailable: the process wants to end.
        """
        delay, broken = 0.05, 0
        while True:
            try:
                return await self.run(name, *args)
            except ERRORS as error:
                self.errors += 1
                if isinstance(error, RedisConnectionError) and _large(args):
                    broken += await self._answers()
                if is_final(error) or broken == BROKEN_TIMES:
                    raise StoreRefused(str(error)) from error
                if time.monotonic() > self._give_up_at:
                    raise StoreUnavailable(
                        f"Redis is away while stopping ({error}); what is leased returns to the "
                        "queue when its lease ends"
                    ) from error
                log.warning(
                    "Redis refused %s, trying again: %s", name, error,
                    extra={"action": "redis_retry"},
                )  # fmt: skip
                await asyncio.sleep(delay)
                delay = min(1.0, delay * 2)

    async def _answers(self) -> bool:
        try:
            return bool(await self.redis.ping())
        except ERRORS:
            return False

    async def most_bytes(self) -> int:
        """Return how many bytes Redis takes in one value."""
        try:
            told = await self.redis.config_get("proto-max-bulk-len")
        except ERRORS:  # users with the rights of docs/security.md may not ask
            return USUALLY_TAKEN_BYTES
        return int(told.get("proto-max-bulk-len", USUALLY_TAKEN_BYTES))

    async def close(self) -> None:
        """Close all connections."""
        await self.redis.aclose()


def _large(args: Sequence[Any]) -> bool:
    """Say whether one of a script's arguments may be more than Redis takes."""
    return any(isinstance(arg, bytes) and len(arg) > ALWAYS_TAKEN_BYTES for arg in args)
