"""The servers of a remote engine: which are well, and which gets the next request.

A subclass of `Server` speaks a protocol; `Fleet` has all servers of one engine.

A server that is away gets no requests until its health is good again. One that hung may look
healthy, and rests for REST_S besides, unless its own judge decides. When no server is left,
requests end with EngineDead: the drain hands them back and starts a new engine, which waits for a
server.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from contract.errors import EngineDead
from contract.settings import SettingsError

log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
SAY_EVERY_S = 30.0
REST_S = 60.0
#: A busy server may answer late; it is away after so many late answers in a row.
MISSES = 3


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


S = TypeVar("S", bound=Server)


class Fleet(Generic[S]):
    """All servers of one engine; times are seconds.

    A server that makes no step for `stall_s` while requests run in it hangs; `start` waits `wait_s`
    for a server, or without end if that is None.
    """

    def __init__(self, stall_s: float, wait_s: float | None) -> None:
        self.servers: Sequence[S] = ()
        #: What `inspect stats` shows of each server, by name.
        self.shown: dict[str, Any] = {}
        self._stall_s = stall_s
        self._wait_s = math.inf if wait_s is None else wait_s
        self._waiting: deque[tuple[asyncio.Future[S], frozenset[S]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._asking: dict[S, asyncio.Task[Health]] = {}
        self._watches: list[asyncio.Task[None]] = []

    @property
    def dead(self) -> bool:
        """Whether no server is left, or one is no longer watched."""
        return not any(s.up for s in self.servers) or any(w.done() for w in self._watches)

    @property
    def away(self) -> str:
        """The servers that are away, each with its reason."""
        return "; ".join(f"{s.name}: {s.why}" for s in self.servers if not s.up)

    @property
    def troubles(self) -> str:
        """The servers that are away or get no requests for a while, each with its reason."""
        return "; ".join(f"{s.name}: {s.trouble}" for s in self.servers if s.trouble)

    @property
    def reasons(self) -> str:
        """Why each server that is away is away."""
        return self.away or "their health is not watched"

    async def start(self, servers: Sequence[S]) -> S:
        """Wait until a server is well, then watch all; return one that is well.

        Raises:
            SettingsError: none can be used with these settings.
            EngineDead: none became well in time.
        """
        self.servers = servers
        began, said_at = time.monotonic(), -math.inf
        while True:
            now = time.monotonic()
            await asyncio.gather(*(self.ask(s) for s in servers if now >= s.ask_from))
            if not self.dead:
                break
            if all(server.unusable for server in servers):
                raise SettingsError(f"no server can be used: {self.reasons}")
            now = time.monotonic()
            if now - began >= self._wait_s:
                waited = f"{self._wait_s:g} s (WARMQ_REMOTE_WAIT_S)"
                raise EngineDead(f"no server is ready after {waited}: {self.reasons}", inside=False)
            if now - said_at >= SAY_EVERY_S:
                said_at = now
                log.warning(
                    "waiting for a server: %s", self.reasons, extra={"action": "server_wait"}
                )
            await asyncio.sleep(ASK_EVERY_S)
        self._watches = [asyncio.create_task(self._watch(server)) for server in servers]
        return next(server for server in servers if server.up)

    async def close(self) -> None:
        """Stop watching, and close every server."""
        if self._timer is not None:
            self._timer.cancel()
        for task in (*self._watches, *self._asking.values()):
            task.cancel()
        ends = await asyncio.gather(*self._watches, *self._asking.values(), return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                log.error("a server's watch failed", exc_info=end, extra={"action": "watch_failed"})
        await asyncio.gather(*(server.close() for server in self.servers))

    async def take(self, avoid: frozenset[S] = frozenset()) -> S:
        """Wait for the least busy server that has room; one not in `avoid` if there is any.

        Whoever takes a server gives it back, once for each time.

        Raises:
            EngineDead: none is left.
        """
        if self.dead:
            raise self._none_left()
        future: asyncio.Future[S] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, avoid))
        self.hand_out()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                future.result().unsent()
                self.give(future.result())
            raise

    def give(self, server: S) -> None:
        """Return a place in a server."""
        server.in_flight -= 1
        self.hand_out()

    def hand_out(self) -> None:
        """Give free places to those that wait, first come first served."""
        now = time.monotonic()
        while self._waiting:
            future, avoid = self._waiting[0]
            if not future.done():
                free = [server for server in self.servers if server.free(now)]
                if not free:
                    self._hand_out_after_pauses(now)
                    return
                best = min(free, key=lambda s: (s in avoid, s.in_flight / (s.limit or 1)))
                best.sends()
                future.set_result(best)
            self._waiting.popleft()

    def _hand_out_after_pauses(self, now: float) -> None:
        ends = [s.opens_at - now for s in self.servers if s.up and s.opens_at > now]
        if self._timer is not None:
            self._timer.cancel()
        if ends:
            self._timer = asyncio.get_running_loop().call_later(min(ends) + 0.001, self.hand_out)

    def _none_left(self) -> EngineDead:
        return EngineDead(f"no server is left: {self.reasons}", inside=False)

    def down(self, server: S, why: str, *, rest_s: float = 0.0, unusable: bool = False) -> None:
        """Send a server no requests until it rested and its health is good."""
        if server.up:
            log.warning("%s is away: %s", server.name, why, extra={"action": "server_away"})
        server.up, server.why, server.unusable = False, why, unusable
        server.rest_until = max(server.rest_until, time.monotonic() + rest_s)
        self.shown[server.name] = server.shown
        if self.dead:
            while self._waiting:
                future, _ = self._waiting.popleft()
                if not future.done():
                    future.set_exception(self._none_left())

    async def ask(self, server: S) -> Health:
        """Ask a server for its health; those who ask meanwhile share the answer."""
        asking = self._asking.get(server)
        if asking is None or asking.done():
            asking = self._asking[server] = asyncio.create_task(self._ask(server))
        return await asyncio.shield(asking)

    async def _ask(self, server: S) -> Health:
        report = await server.ask()
        late = report.health is Health.SILENT
        server.misses = server.misses + 1 if late else 0
        if report.health is Health.WELL:
            if not server.up and time.monotonic() >= server.rest_until:
                log.info("%s is ready", server.name, extra={"action": "server_ready"})
                server.up = True
            self.hand_out()
        elif not (late and server.up and server.misses < MISSES):
            self.down(server, report.why, unusable=report.health is Health.UNUSABLE)
        self.shown[server.name] = server.shown
        return report.health

    async def _watch(self, server: S) -> None:
        """Ask one server for ever; end what hangs in it."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            if time.monotonic() >= server.ask_from:
                await self.ask(server)
            if server.up and not server.misses:
                await server.measure()
                self.hand_out()
            self.shown[server.name] = server.shown
            if server.stalled(self._stall_s):
                log.error(
                    "%s made no step for %.0f s with %d requests in it",
                    server.name,
                    self._stall_s,
                    server.in_flight,
                    extra={"action": "server_hung"},
                )
                why = f"no step for {self._stall_s:g} s (WARMQ_STALL_TIMEOUT_S)"
                if server.away_if_stalled:
                    self.down(server, "hangs", rest_s=REST_S)
                server.interrupt(why)

    def last_progress(self) -> float:
        """Return when a server last made a step; now, if no request is in any."""
        busy = [server.progress_at for server in self.servers if server.in_flight]
        return max(busy, default=time.monotonic())

    def kill(self) -> None:
        """Give up every server; what runs in them is interrupted."""
        for server in self.servers:
            self.down(server, "was given up", rest_s=REST_S)
            server.interrupt("the server was given up")
