"""The servers behind the `openai` engine: which are well, and which gets the next request.

Each has a limit of requests in flight. It is a set number, or follows the server's own metrics
so that a few requests wait there and no more: no slot idles, no other client is pushed back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from contract.errors import EngineDead
from worker.engine.openai.limits import Metrics, next_limit, read_metrics
from worker.engine.openai.retries import FIRST_PAUSE_S, LONGEST_PAUSE_S, Health

log = logging.getLogger(__name__)

PROBE_S = 1.0
#: Also a server that says `Retry-After: 0` is not asked without end.
SHORTEST_PAUSE_S = 0.1
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5)
#: A busy server may be late; it is away after so many probes in a row.
MISSES = 3
FIRST_LIMIT = 32
#: What is left of the most that ran at once, each second: half of it after 70 s.
PEAK_FADES = 0.99
#: Most requests in flight per server where no number is set.
CEILING = 256


@dataclass(eq=False, slots=True)
class Upstream:
    """One server: `base` ends in /v1, `root` is where /health and /metrics are.

    `models` is what it lists, `model` which of them is used; `up`: it may get requests; `closed`:
    it refuses the key or has not the model, and does not heal by itself.
    """

    base: str
    limit: int
    root: str = ""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    model: str = ""
    vllm: bool = False
    up: bool = False
    closed: bool = False
    why: str = "not asked yet"
    in_flight: int = 0
    misses: int = 0
    paused_until: float = 0.0
    pause_s: float = 0.0
    tokens: float = -1.0
    peak: float = 0.0
    progress_at: float = field(default_factory=time.monotonic)
    scopes: set[asyncio.Timeout] = field(default_factory=set)
    probing: asyncio.Task[Health] | None = None

    def __post_init__(self) -> None:
        self.root = self.base.removesuffix("/v1")

    @property
    def name(self) -> str:
        """Host and port, for logs."""
        return urlsplit(self.base).netloc

    def address(self, url: str) -> str:
        """Return where an endpoint is: `url` as in a batch line."""
        if url.startswith("/v1/"):
            return self.base + url.removeprefix("/v1")
        return self.root + url

    def free(self, now: float) -> bool:
        """Whether it may get one more request."""
        return self.up and self.in_flight < self.limit and now >= self.paused_until

    def progress(self) -> None:
        """Note that it made a step."""
        self.progress_at = time.monotonic()

    def pause(self, wait_s: float | None, *, adaptive: bool) -> None:
        """Leave it alone for a while: as long as it asked, or longer each time."""
        now = time.monotonic()
        if now >= self.paused_until:  # all that were in flight are told so: once is enough
            self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), LONGEST_PAUSE_S)
            if adaptive:
                self.limit = max(1, int(0.7 * min(self.limit, self.in_flight)))
        wait_s = self.pause_s if wait_s is None else max(wait_s, SHORTEST_PAUSE_S)
        self.paused_until = max(self.paused_until, now + wait_s)

    @contextlib.contextmanager
    def watched(self, scope: asyncio.Timeout) -> Iterator[None]:
        """Let `interrupt` end what runs inside."""
        if not self.scopes:
            self.progress()
        self.scopes.add(scope)
        try:
            yield
        finally:
            self.scopes.discard(scope)

    def interrupt(self) -> None:
        """End every request in it with a TimeoutError."""
        for scope in self.scopes:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())


class Fleet:
    """All servers; hands each request to the one with the least in flight for its limit.

    A context of its own session: one connection pool, as large as all limits together.
    """

    def __init__(
        self,
        urls: list[str],
        session: aiohttp.ClientSession,
        *,
        model: str | None,
        concurrency: int | None,
        stall_s: float,
    ) -> None:
        self.adaptive = concurrency is None
        self.upstreams = [Upstream(url, concurrency or FIRST_LIMIT) for url in urls]
        #: What `inspect stats` shows: limit and in_flight by server, or why it is away.
        self.shown: dict[str, Any] = {}
        self._session = session
        self._model = model
        self._stall_s = stall_s
        self._waiting: deque[tuple[asyncio.Future[Upstream], frozenset[Upstream]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def dead(self) -> bool:
        """Whether no server is left."""
        return not any(u.up for u in self.upstreams)

    @property
    def reasons(self) -> str:
        """Why each server that is away is away."""
        return "; ".join(f"{u.name} {u.why}" for u in self.upstreams if not u.up)

    async def close(self) -> None:
        """End what is being asked."""
        if self._timer is not None:
            self._timer.cancel()
        probes = [u.probing for u in self.upstreams if u.probing is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    # -- handing out ------------------------------------------------------------

    async def take(self, avoid: frozenset[Upstream]) -> Upstream:
        """Wait for a server with room; one not in `avoid` if there is any. Give it back.

        Raises:
            EngineDead: none is left.
        """
        if self.dead:
            raise self.away()
        future: asyncio.Future[Upstream] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, avoid))
        self.hand_out()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self.give(future.result())
            raise

    def give(self, upstream: Upstream) -> None:
        """Return a place."""
        upstream.in_flight -= 1
        self.hand_out()

    def hand_out(self) -> None:
        """Give free places to those that wait, first come first served."""
        now = time.monotonic()
        while self._waiting:
            future, avoid = self._waiting[0]
            if not future.done():
                free = [u for u in self.upstreams if u.free(now)]
                if not free:
                    self._wake_later(now)
                    return
                best = min(free, key=lambda u: (u in avoid, u.in_flight / u.limit))
                best.in_flight += 1
                future.set_result(best)
            self._waiting.popleft()

    def _wake_later(self, now: float) -> None:
        """Look again when the first pause ends."""
        ends = [u.paused_until - now for u in self.upstreams if u.up and u.paused_until > now]
        if self._timer is not None:
            self._timer.cancel()
        if ends:
            self._timer = asyncio.get_running_loop().call_later(min(ends) + 0.001, self.hand_out)

    def away(self) -> EngineDead:
        """Return the error of a request that no server can be found for."""
        return EngineDead(f"no server is left: {self.reasons}", inside=False)

    def down(self, upstream: Upstream, why: str) -> None:
        """Take a server out until its health answers again."""
        if upstream.up:
            log.warning("%s: %s", upstream.name, why, extra={"action": "upstream_down"})
        upstream.up, upstream.why = False, why
        self._show(upstream)
        if self.dead:
            while self._waiting:
                future, _ = self._waiting.popleft()
                if not future.done():
                    future.set_exception(self.away())

    # -- health -----------------------------------------------------------------

    async def probe(self, upstream: Upstream) -> Health:
        """Ask one server how it is, and once it is well what it serves; one question for all."""
        if upstream.probing is None or upstream.probing.done():
            upstream.probing = asyncio.create_task(self._probe(upstream))
        return await asyncio.shield(upstream.probing)

    async def _probe(self, upstream: Upstream) -> Health:
        try:
            status, _ = await self._get(upstream.root + "/health")
            if status in (404, 405) or (status < 400 and not upstream.up):
                status, page = await self._get(upstream.base + "/models")
                self._learn(upstream, status, page)
        except TimeoutError:
            upstream.misses += 1
            if upstream.misses >= MISSES:
                self.down(upstream, "does not answer")
            return Health.SILENT
        except (aiohttp.ClientError, OSError) as error:
            self.down(upstream, f"cannot be reached: {error}")
            return Health.ILL
        upstream.misses = 0
        if status >= 500:
            self.down(upstream, f"its health is {status}")
            return Health.ILL
        if upstream.closed:
            return Health.ILL
        if not upstream.up:
            log.info("%s is up", upstream.name, extra={"action": "upstream_up"})
            upstream.up, upstream.paused_until, upstream.pause_s = True, 0.0, 0.0
            self._show(upstream)
        self.hand_out()
        return Health.WELL

    async def _get(self, url: str) -> tuple[int, bytes]:
        async with self._session.get(url, timeout=PROBE_TIMEOUT, allow_redirects=False) as response:
            return response.status, await response.read()

    def _learn(self, upstream: Upstream, status: int, page: bytes) -> None:
        """Read the list of models; a server without one needs its model named."""
        if status in (401, 403):
            upstream.closed = True
            self.down(upstream, "refuses the key: WARMQ_OPENAI_API_KEY")
            return
        try:
            listed = orjson.loads(page)["data"] if status == 200 else []
            models = {str(model["id"]): model for model in listed}
        except (ValueError, LookupError, TypeError):
            models = {}
        model = self._model or next(iter(models), "")
        upstream.closed = not model or bool(models and model not in models)
        if upstream.closed:
            listing = ", ".join(models) or "lists no model"
            self.down(upstream, f"serves {listing}; WARMQ_MODEL is {self._model or 'not set'}")
        upstream.models, upstream.model = models, model
        upstream.vllm = models.get(model, {}).get("owned_by") == "vllm"

    async def watch(self, upstream: Upstream) -> None:
        """Probe one server for ever; adapt its limit; end what hangs in it."""
        while True:
            await asyncio.sleep(PROBE_S)
            if await self.probe(upstream) is Health.WELL:
                metrics = await self._measure(upstream)
                if self.adaptive and time.monotonic() >= upstream.paused_until:
                    running = metrics.running if metrics is not None else 0.0
                    upstream.peak = max(running, PEAK_FADES * upstream.peak)
                    upstream.limit = next_limit(
                        upstream.limit, upstream.in_flight, metrics, upstream.peak, CEILING
                    )
                    self.hand_out()
            if upstream.scopes and time.monotonic() - upstream.progress_at > self._stall_s:
                log.error(
                    "%s made no step for %.0f s with %d requests in it", upstream.name,
                    self._stall_s, len(upstream.scopes), extra={"action": "upstream_hung"},
                )  # fmt: skip
                upstream.interrupt()
            self._show(upstream)

    def _show(self, upstream: Upstream) -> None:
        load = {"limit": upstream.limit, "in_flight": upstream.in_flight}
        self.shown[upstream.name] = load if upstream.up else upstream.why

    async def _measure(self, upstream: Upstream) -> Metrics | None:
        try:
            status, page = await self._get(upstream.root + "/metrics")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            log.debug("metrics of %s: %s", upstream.name, error)
            return None
        metrics = read_metrics(page) if status == 200 else None
        if metrics is not None and metrics.tokens != upstream.tokens:
            # What is not streamed, or waits behind other clients, is seen to move here only.
            upstream.tokens = metrics.tokens
            upstream.progress()
        return metrics
