"""What a fleet knows of one server; a subclass speaks its protocol."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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
    requests before, and does not count as well if it is away; `ask_from`: its health is not asked
    before, unless something went wrong; `progress_at`: its latest step.
    """

    #: Whether one that makes no step while requests run in it counts as away.
    away_if_stalled = True

    def __init__(self, name: str, limit: int | None = None) -> None:
        self.name = name
        self.limit = limit
        self.up = False
        self.unusable = False
        self.why = "not asked yet"
        self.in_flight = 0
        self.misses = 0
        self.rest_until = 0.0
        self.ask_from = 0.0
        self.progress_at = time.monotonic()
        self._running: set[asyncio.Timeout] = set()
        self._interrupted = ""
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
        trouble = {"trouble": self.trouble} if self.trouble else {}
        limit = {"limit": self.limit} if self.limit else {}
        return limit | {"in_flight": self.in_flight} | trouble

    @property
    def trouble(self) -> str:
        """Why it gets no requests, or fewer than it could; '' if nothing is wrong."""
        return "" if self.up else self.why

    @property
    def opens_at(self) -> float:
        """Until when it rests."""
        return self.rest_until

    def free(self, now: float) -> bool:
        """Whether it may get one more request."""
        full = self.limit is not None and self.in_flight >= self.limit
        return self.up and not full and now >= self.rest_until

    def sends(self) -> None:
        """Note that it gets a request."""
        self.in_flight += 1

    def unsent(self) -> None:
        """Note that a request which it was to get is not sent; its place is given back, too."""

    def progress(self) -> None:
        """Note that it made a step."""
        self.progress_at = time.monotonic()
        self.stepped()

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
            raise Interrupted(self._interrupted) from error
        finally:
            self._running.discard(scope)

    def interrupt(self, why: str) -> None:
        """End every request that runs in it."""
        self._interrupted = why
        for scope in self._running:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
