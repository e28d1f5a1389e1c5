"""Runs the worker's Lua scripts in Redis: once, or until Redis has run them."""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from contract.errors import StoreRefused, StoreUnavailable, StoreUnreachable
from contract.redis.foreign_keys import types_of, wrong_types

log = logging.getLogger(__name__)

#: The errors that a drain survives: Redis cannot be used now, or a socket failed.
ERRORS = (StoreUnavailable, OSError)
#: The lowest proto-max-bulk-len that Redis allows: a value of this many bytes is never too large.
ALWAYS_TAKEN_BYTES = 2**20
#: Redis's default of proto-max-bulk-len, for workers whose user may not call CONFIG GET.
DEFAULT_TAKEN_BYTES = 512 * 2**20
#: The number of broken connections after which a large write counts as refused, if Redis answers
#: a PING after each.
BROKEN_TIMES = 3
#: The scripts that every worker runs; /metrics has their series from the start.
SCRIPTS = ("done", "pop", "release", "renew", "ring", "sweep")
#: What a worker does by each script that it tries until Redis has run it.
UNTIL_DONE = {
    "bury": "move a request to the dead letters",
    "done": "store results",
    "release": "put requests back into the queue",
}


class Scripts:
    """Runs Lua scripts for a worker of one queue."""

    def __init__(self, client: Any, queue: str) -> None:
        self._client, self._queue = client, queue
        self._give_up_at = math.inf

    def give_up_in(self, seconds: float) -> None:
        """Stop retrying writes `seconds` from now, because the process is about to end."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + seconds)

    async def run(self, name: str, *args: Any) -> Any:
        """Run a script once.

        Raises:
            StoreUnavailable: Redis does not run it now.
        """
        try:
            return await self._client.run_script(name, *args)
        except StoreRefused as error:
            if "WRONGTYPE" in error.message:
                raise StoreRefused(error.message + await self._foreign_keys()) from error
            raise

    async def _foreign_keys(self) -> str:
        """Return text that names the queue's keys whose type is not warmq's; '' if unknown."""
        names = [*types_of(self._queue)]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.type(name)
        try:
            types = dict(zip(names, await pipe.execute(), strict=True))
        except ERRORS:
            return ""
        return "".join(
            f"; the key {key!r} is a {of_type} of another program"
            for key, of_type in wrong_types(self._queue, types).items()
        )

    async def until_done(self, name: str, *args: Any) -> Any:
        """Run a script, and retry it until Redis has run it.

        Raises:
            StoreRefused: Redis would refuse the script at any time.
            StoreUnavailable: Redis has not run it by the time set with `give_up_in`.
        """
        delay, broken, level = 0.05, 0, logging.WARNING
        while True:
            try:
                return await self.run(name, *args)
            except ERRORS as error:
                if isinstance(error, StoreUnreachable) and _large(args):
                    broken += await self._answers_ping()
                if isinstance(error, StoreRefused) or broken == BROKEN_TIMES:
                    raise StoreRefused(str(error)) from error
                if time.monotonic() > self._give_up_at:
                    raise StoreUnavailable(
                        "Redis is unreachable while stopping; leased requests return to the queue "
                        f"when their leases end. {error}"
                    ) from error
                text = "Redis did not %s, trying again: %s"
                log.log(level, text, UNTIL_DONE[name], error, extra={"action": "redis_retry"})
                level = logging.DEBUG  # only the first try logs a warning
                await asyncio.sleep(delay)
                delay = min(1.0, delay * 2)

    async def _answers_ping(self) -> bool:
        try:
            return bool(await self._client.ping())
        except ERRORS:
            return False

    async def max_bytes(self) -> int:
        """Return the most bytes of one value that Redis accepts."""
        try:
            config = await self._client.config_get("proto-max-bulk-len")
        except ERRORS:  # the Redis user of docs/how-to/security.md may not call CONFIG GET
            return DEFAULT_TAKEN_BYTES
        return int(config.get("proto-max-bulk-len", DEFAULT_TAKEN_BYTES))


def _large(args: Sequence[Any]) -> bool:
    """Return whether an argument may have more bytes than Redis accepts."""
    return any(isinstance(arg, bytes) and len(arg) > ALWAYS_TAKEN_BYTES for arg in args)
