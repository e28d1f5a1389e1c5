"""The worker's scripts in Redis, run once or until Redis has taken them."""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from contract.errors import StoreRefused, StoreUnavailable, StoreUnreachable
from contract.redis.foreign_keys import types_of, wrong_types

log = logging.getLogger(__name__)

#: What a drain survives: Redis cannot be used now (contract/redis/client.py), or a socket failed.
ERRORS = (StoreUnavailable, OSError)
#: The lowest proto-max-bulk-len that Redis can be given: no value up to it is too large.
ALWAYS_TAKEN_BYTES = 2**20
#: The default of proto-max-bulk-len, for where the worker may not ask.
USUALLY_TAKEN_BYTES = 512 * 2**20
#: If the connection breaks so often during the same large write although Redis answers a PING,
#: Redis is closing it because of the write.
BROKEN_TIMES = 3
#: Scripts that every worker runs: metrics tell of them before their first call.
SCRIPTS = ("done", "pop", "release", "renew", "ring", "sweep")


class Scripts:
    """Runs Lua scripts in one Redis, for a worker of one queue."""

    def __init__(self, client: Any, queue: str) -> None:
        self._client, self._queue = client, queue
        self._give_up_at = math.inf

    def give_up_in(self, seconds: float) -> None:
        """Stop trying to write after so many seconds: the process wants to end."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + seconds)

    async def run(self, name: str, *args: Any) -> Any:
        """Run a script once. Raises StoreUnavailable if Redis does not take it now."""
        try:
            return await self._client.run_script(name, *args)
        except StoreRefused as error:
            if "WRONGTYPE" in error.message:
                raise StoreRefused(error.message + await self._strangers()) from error
            raise

    async def _strangers(self) -> str:
        """Name the keys that another program uses, as far as this one may know."""
        names = [*types_of(self._queue)]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.type(name)
        try:
            found = dict(zip(names, await pipe.execute(), strict=True))
        except ERRORS:
            return ""
        told = wrong_types(self._queue, found).items()
        return "".join(f"; the key {key!r} is a {kind} of another program" for key, kind in told)

    async def until_done(self, name: str, *args: Any) -> Any:
        """Run a script, again and again while Redis is away.

        Raises:
            StoreRefused: Redis would refuse it at any time.
            StoreUnavailable: the process wants to end (`give_up_in`).
        """
        delay, broken, level = 0.05, 0, logging.WARNING
        while True:
            try:
                return await self.run(name, *args)
            except ERRORS as error:
                if isinstance(error, StoreUnreachable) and _large(args):
                    broken += await self._answers()
                if isinstance(error, StoreRefused) or broken == BROKEN_TIMES:
                    raise StoreRefused(str(error)) from error
                if time.monotonic() > self._give_up_at:
                    raise StoreUnavailable(
                        "Redis is away while stopping; what is leased returns to the queue when "
                        f"its lease ends. {error}"
                    ) from error
                log.log(
                    level,
                    "Redis refused %s, trying again: %s",
                    name,
                    error,
                    extra={"action": "redis_retry"},
                )
                level = logging.DEBUG  # told once
                await asyncio.sleep(delay)
                delay = min(1.0, delay * 2)

    async def _answers(self) -> bool:
        try:
            return bool(await self._client.ping())
        except ERRORS:
            return False

    async def most_bytes(self) -> int:
        """Return how many bytes Redis takes in one value."""
        try:
            told = await self._client.config_get("proto-max-bulk-len")
        except ERRORS:  # users with the rights of docs/how-to/security.md may not ask
            return USUALLY_TAKEN_BYTES
        return int(told.get("proto-max-bulk-len", USUALLY_TAKEN_BYTES))


def _large(args: Sequence[Any]) -> bool:
    """Say whether one of a script's arguments may be more than Redis takes."""
    return any(isinstance(arg, bytes) and len(arg) > ALWAYS_TAKEN_BYTES for arg in args)
