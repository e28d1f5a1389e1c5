"""Watches the health of a remote engine's servers, and chooses one for each request.

A subclass of `Server` speaks HTTP or gRPC with it. `Servers` contains all servers of one engine.

A server that is down gets no requests until its health is good again. After a hang, a server may
appear healthy, so it also rests: it gets no requests for REST_S seconds. A class of servers may
decide on rests itself (`down_if_stalled`). If no server is left, requests end with EngineDead: the
drain returns them to the queue and starts a new engine, which waits for a server.
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

#: Seconds between two health checks of a server.
ASK_EVERY_S = 1.0
#: Seconds between two log lines while a start waits for a server.
LOG_EVERY_S = 30.0
#: Seconds in which a server gets no requests after a hang.
REST_S = 60.0
#: Health checks in a row without an answer in time, after which a server is down. One is not
#: enough: a busy server may answer late.
MISSES = 3


class Health(StrEnum):
    """The results of a health check."""

    WELL = "answers, and is well"
    ILL = "answers with an error, or refuses the connection"
    SILENT = "does not answer in time"
    UNUSABLE = "answers, but cannot be used with these settings"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a health check; `why` is the problem, logged after the server's name."""

    health: Health
    why: str = ""


class Interrupted(Exception):
    """The worker ended a request: its server made no step, or was given up."""


class Server:
    """One server. Times are time.monotonic().

    - `limit`: most requests in flight, None without a limit;
    - `up`: the server may get requests; otherwise `why` is the reason;
    - `unusable`: the server can be used only with other settings;
    - `misses`: health checks in a row without an answer in time;
    - `rest_until`: time until which it gets no requests, and stays down if it is down;
    - `check_from`: time of the next health check, unless a request fails before;
    - `progress_at`: time of its latest step; `stepped` is called at each step.
    """

    #: Whether a server counts as down if it makes no step while it runs requests.
    down_if_stalled = True

    def __init__(self, name: str, limit: int | None = None) -> None:
        self.name = name
        self.limit = limit
        self.up = False
        self.unusable = False
        self.why = "not asked yet"
        self.in_flight = 0
        self.misses = 0
        self.rest_until = 0.0
        self.check_from = 0.0
        self.progress_at = time.monotonic()
        self.stepped: Callable[[], None] = lambda: None
        self._running: set[asyncio.Timeout] = set()
        self._interrupted = ""

    async def ask(self) -> Report:
        """Check the server's health; if it was down, also read its models."""
        raise NotImplementedError

    async def measure(self) -> None:
        """Read the metrics of a healthy server. Called after every `ask`."""

    async def close(self) -> None:
        """Close connections that belong to this server alone."""

    @property
    def shown(self) -> Any:
        """The server's row in `inspect stats`."""
        if not self.up:
            return self.why
        trouble = {"trouble": self.trouble} if self.trouble else {}
        limit = {"limit": self.limit} if self.limit else {}
        return limit | {"in_flight": self.in_flight} | trouble

    @property
    def trouble(self) -> str:
        """Why the server gets no requests, or fewer; '' if nothing is wrong."""
        return "" if self.up else self.why

    @property
    def opens_at(self) -> float:
        """The time at which the present rest ends."""
        return self.rest_until

    def free(self, now: float) -> bool:
        """Whether the server may get one more request."""
        full = self.limit is not None and self.in_flight >= self.limit
        return self.up and not full and now >= self.rest_until

    def gets_request(self) -> None:
        """Note that the server gets a request."""
        self.in_flight += 1

    def note_unsent(self) -> None:
        """Note that the latest request is not sent after all; `give` is called next."""

    def progress(self) -> None:
        """Note a step: the server has sent data, or has counted more tokens."""
        self.progress_at = time.monotonic()
        self.stepped()

    def stalled(self, stall_s: float) -> bool:
        """Whether the server runs requests, and has made no step for `stall_s` seconds."""
        return bool(self._running) and time.monotonic() - self.progress_at > stall_s

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run one request in this context; `interrupt` ends it with Interrupted."""
        scope = asyncio.timeout(None)
        if not self._running:
            self.progress()
        self._running.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():  # a time limit of the HTTP or gRPC library
                raise
            raise Interrupted(self._interrupted) from error
        finally:
            self._running.discard(scope)

    def interrupt(self, why: str) -> None:
        """End every request that the server runs; `why` is the error text."""
        self._interrupted = why
        for scope in self._running:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())


S = TypeVar("S", bound=Server)


class Servers(Generic[S]):
    """All servers of one engine. Times are in seconds.

    A server hangs if it makes no step for `stall_s` while it runs requests. `start` waits at most
    `wait_s` for a server, or without limit if that is None.
    """

    def __init__(self, stall_s: float, wait_s: float | None) -> None:
        self.servers: Sequence[S] = ()
        #: The row of each server in `inspect stats`, by its name.
        self.shown: dict[str, Any] = {}
        self._stall_s = stall_s
        self._wait_s = math.inf if wait_s is None else wait_s
        self._waiting: deque[tuple[asyncio.Future[S], frozenset[S]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._asking: dict[S, asyncio.Task[Health]] = {}
        self._watches: list[asyncio.Task[None]] = []

    @property
    def dead(self) -> bool:
        """Whether no server is up, or a task that watches a server has ended."""
        return not any(s.up for s in self.servers) or any(w.done() for w in self._watches)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a free server."""
        return len(self._waiting)

    @property
    def down_reasons(self) -> str:
        """The servers that are down, each with the reason."""
        return "; ".join(f"{s.name}: {s.why}" for s in self.servers if not s.up)

    @property
    def troubles(self) -> str:
        """The servers that are down or rest, each with the reason."""
        return "; ".join(f"{s.name}: {s.trouble}" for s in self.servers if s.trouble)

    async def start(self, servers: Sequence[S]) -> S:
        """Wait until a server is healthy, then watch all servers; return a healthy one.

        Raises:
            SettingsError: no server can be used with these settings.
            EngineDead: no server became healthy in time.
        """
        self.servers = servers
        began, logged_at = time.monotonic(), -math.inf
        while True:
            now = time.monotonic()
            await asyncio.gather(*(self.ask(s) for s in servers if now >= s.check_from))
            if not self.dead:
                break
            if all(server.unusable for server in servers):
                raise SettingsError(f"no server can be used: {self.down_reasons}")
            now = time.monotonic()
            if now - began >= self._wait_s:
                waited = f"{self._wait_s:g} s (WARMQ_REMOTE_WAIT_S)"
                raise EngineDead(
                    f"no server is ready after {waited}: {self.down_reasons}", inside=False
                )
            if now - logged_at >= LOG_EVERY_S:
                logged_at = now
                log.warning(
                    "waiting for a server: %s", self.down_reasons, extra={"action": "server_wait"}
                )
            await asyncio.sleep(ASK_EVERY_S)
        self._watches = [asyncio.create_task(self._watch(server)) for server in servers]
        return next(server for server in servers if server.up)

    async def close(self) -> None:
        """Stop watching, and close every server."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = (*self._watches, *self._asking.values())
        for task in tasks:
            task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(end, Exception):
                log.error("a server's watch failed", exc_info=end, extra={"action": "watch_failed"})
        await asyncio.gather(*(server.close() for server in self.servers))

    async def take(self, avoid: frozenset[S] = frozenset()) -> S:
        """Wait for a free server, and return the least busy; `give` releases it again.

        A server in `avoid` is chosen only if no other is free.

        Raises:
            EngineDead: no server is left.
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
                future.result().note_unsent()
                self.give(future.result())
            raise

    def give(self, server: S) -> None:
        """Note that a request is no longer in flight at this server."""
        server.in_flight -= 1
        self.hand_out()

    def hand_out(self) -> None:
        """Assign free servers to waiting requests, in the order in which they came."""
        now = time.monotonic()
        while self._waiting:
            future, avoid = self._waiting[0]
            if not future.done():
                free = [server for server in self.servers if server.free(now)]
                if not free:
                    self._hand_out_after_rests(now)
                    return
                best = min(free, key=lambda s: (s in avoid, s.in_flight / (s.limit or 1)))
                best.gets_request()
                future.set_result(best)
            self._waiting.popleft()

    def _hand_out_after_rests(self, now: float) -> None:
        ends = [s.opens_at - now for s in self.servers if s.up and s.opens_at > now]
        if self._timer is not None:
            self._timer.cancel()
        if ends:
            self._timer = asyncio.get_running_loop().call_later(min(ends) + 0.001, self.hand_out)

    def _none_left(self) -> EngineDead:
        reasons = self.down_reasons or "their health is not watched"
        return EngineDead(f"no server is left: {reasons}", inside=False)

    def down(self, server: S, why: str, *, rest_s: float = 0.0, unusable: bool = False) -> None:
        """Send a server no requests until `rest_s` seconds have passed and its health is good."""
        if server.up:
            log.warning("%s is down: %s", server.name, why, extra={"action": "server_away"})
        server.up, server.why, server.unusable = False, why, unusable
        server.rest_until = max(server.rest_until, time.monotonic() + rest_s)
        self.shown[server.name] = server.shown
        if self.dead:
            while self._waiting:
                future, _ = self._waiting.popleft()
                if not future.done():
                    future.set_exception(self._none_left())

    async def ask(self, server: S) -> Health:
        """Check a server's health; callers during the check get the same result."""
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
        """Check one server's health until cancelled; end its requests if it hangs."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            if time.monotonic() >= server.check_from:
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
                if server.down_if_stalled:
                    self.down(server, "hangs", rest_s=REST_S)
                server.interrupt(f"no step for {self._stall_s:g} s (WARMQ_STALL_TIMEOUT_S)")

    def last_progress(self) -> float:
        """Return the time of the latest step, or now if no request is in flight."""
        latest = [server.progress_at for server in self.servers if server.in_flight]
        return max(latest, default=time.monotonic())

    def kill(self) -> None:
        """Give up every server, and end the requests that it runs."""
        for server in self.servers:
            self.down(server, "was abandoned", rest_s=REST_S)
            server.interrupt("the server was abandoned")
