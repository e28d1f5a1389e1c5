"""What a fleet knows of one server; a subclass speaks its protocol."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

#: A server that asks for a pause and names no time gets this long, doubled each time in a row.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
#: A server that names no time at all (`Retry-After: 0`) is not asked in a tight loop.
SHORTEST_PAUSE_S = 0.1


class Health(StrEnum):
    """What came of asking a server for its health."""

    WELL = "answers, and is well"
    ILL = "answers with an error, or refuses the connection"
    SILENT = "does not answer in time"
    UNUSABLE = "answers, but cannot be used with these settings"


def _nobody() -> None:
    """Take the place of who wants to know of steps."""


@dataclass(frozen=True, slots=True)
class Report:
    """A server's health; `why` says what is wrong, as a log shows it after the server's name."""

    health: Health
    why: str = ""


class Interrupted(Exception):
    """A request was ended from here: its server made no step, or was given up."""


class Server:
    """One server. Times are time.monotonic().

    `up`: it may get requests, else `why` says why not; `unusable`: waiting does not help, a setting
    must change; `limit`: most requests in flight, None for any number; `rest_until`: it gets no
    requests before, and does not count as well if it is away; `progress_at`: its latest step.
    """

    def __init__(self, name: str, limit: int | None = None) -> None:
        self.name = name
        self.limit = limit
        self.up = False
        self.unusable = False
        self.why = "not asked yet"
        self.in_flight = 0
        self.misses = 0
        self.rest_until = 0.0
        self.pause_s = 0.0
        self.progress_at = time.monotonic()
        self._running: set[asyncio.Timeout] = set()
        #: Called with each step it makes.
        self.stepped: Callable[[], None] = _nobody

    async def ask(self) -> Report:
        """Ask the server for its health, and if it was away, for what it serves."""
        raise NotImplementedError

    async def measure(self) -> None:
        """Read what else a server that is well tells of itself; called after every `ask`."""

    async def close(self) -> None:
        """Close the connections that are this server's own."""

    @property
    def shown(self) -> Any:
        """What `inspect stats` shows of it."""
        if not self.up:
            return self.why
        return ({"limit": self.limit} if self.limit else {}) | {"in_flight": self.in_flight}

    def free(self, now: float) -> bool:
        """Whether it may get one more request."""
        full = self.limit is not None and self.in_flight >= self.limit
        return self.up and not full and now >= self.rest_until

    def progress(self) -> None:
        """Note that it made a step."""
        self.progress_at = time.monotonic()
        self.stepped()

    def pause(self, wait_s: float | None) -> None:
        """Send it nothing for a while: as long as it asked for, or longer each time."""
        now = time.monotonic()
        if not self.up:
            return
        if now >= self.rest_until:  # every request in flight is told so; that counts once
            self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), LONGEST_PAUSE_S)
        wait_s = self.pause_s if wait_s is None else max(wait_s, SHORTEST_PAUSE_S)
        self.rest_until = max(self.rest_until, now + wait_s)

    def stalled(self, stall_s: float) -> bool:
        """Whether requests run in it and it made no step for so many seconds."""
        return bool(self._running) and time.monotonic() - self.progress_at > stall_s

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run one request inside.

        Raises:
            Interrupted: `interrupt` was called.
        """
        scope = asyncio.timeout(None)
        if not self._running:
            self.progress()
        self._running.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():  # a time limit of the protocol's library
                raise
            raise Interrupted("no step was made") from error
        finally:
            self._running.discard(scope)

    def interrupt(self) -> None:
        """End every request that runs in it."""
        for scope in self._running:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
