"""A worker's share of a server, leased in Redis: workers at one server have one limit.

The rules are in worker/lua/server_share.lua.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from contract.errors import StoreUnavailable
from worker.engine.openai.upstream import Upstream

log = logging.getLogger(__name__)

#: Seconds of a lease, and between two renewals.
LEASE_S, RENEW_S = 5.0, 0.5
#: Seconds in which Redis has to answer.
ANSWER_S = 2.0

#: Times to the first token and between tokens, in seconds; None: unknown.
Quiet = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker reports with a renewal.

    `can_lead`: it can measure the server. `waiting` requests wait in the worker. The leader adds
    its `limit`, what it has measured (`shown`), and new `quiet` values.
    """

    can_lead: bool
    waiting: int
    limit: int | None = None
    shown: dict[str, Any] = field(default_factory=dict)
    quiet: Quiet | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """The answer to a renewal.

    `leads`: this worker measures the server. `limit`: of all workers, as the leader has published
    it. `share` is this worker's part. `peers` is the number of other workers, which may have
    `peers_in_flight` requests in the server. `shown` is what the leader has measured.
    """

    leads: bool
    limit: int | None
    share: int
    peers: int
    peers_in_flight: int
    tokens_today: int
    shown: dict[str, Any]
    quiet: Quiet


class ServerShare:
    """Renews the lease of one worker at one server.

    `tried`: Redis has answered once, or has failed to. `latest` is the latest lease, which may have
    ended.
    """

    def __init__(self, client: Any, upstream: Upstream) -> None:
        self.tried = False
        self.latest: Lease | None = None
        self._client, self._upstream = client, upstream
        self._worker = uuid.uuid4().hex
        self._address = upstream.root.partition("://")[2]
        self._renewed_at = -math.inf
        self._soon = asyncio.Event()
        #: Our requests in flight at the last renewal.
        self._in_flight = 0
        #: Our answers and tokens that Redis has counted.
        self._answered = self._written = 0
        #: Redis's count of all workers' answers, and the count at which `finished` began.
        self._counted = self._began_at = 0

    @property
    def lease(self) -> Lease | None:
        """The latest lease; None if it has ended, because Redis does not answer."""
        fresh = time.monotonic() - self._renewed_at < LEASE_S
        return self.latest if fresh else None

    @property
    def finished(self) -> int:
        """Answers of the server to all workers since this one began, as far as they are known."""
        return self._counted - self._began_at + self._upstream.finished - self._answered

    @property
    def tokens_today(self) -> int:
        """Tokens that the server has written for all workers today (UTC)."""
        counted = self.latest.tokens_today if self.latest is not None else 0
        return counted + self._upstream.written - self._written

    def renew_soon(self) -> None:
        """Renew the lease now: there is something to publish."""
        self._soon.set()

    async def run(self, report: Callable[[], Report], renewed: Callable[[], None]) -> None:
        """Renew the lease until cancelled; call `renewed` after each try."""
        while True:
            self._soon.clear()
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._renew(report())
            except (StoreUnavailable, OSError, TimeoutError) as error:
                log.debug("no lease on %s: %s", self._address, error)
            self.tried = True
            renewed()
            try:
                async with asyncio.timeout(RENEW_S):
                    await self._soon.wait()
            except TimeoutError:
                continue

    async def leave(self) -> None:
        """Give the share back, so that the other workers need not wait for the lease's end."""
        if self.latest is None:
            return
        tokens = self._upstream.written - self._written
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._run_script(0, 0, 0, 0, 0, tokens, "", "", "", "")
        except (StoreUnavailable, OSError, TimeoutError) as error:
            log.debug("the lease on %s ends by itself: %s", self._address, error)

    async def _renew(self, report: Report) -> None:
        upstream = self._upstream
        most, self._in_flight = max(self._in_flight, upstream.in_flight), upstream.in_flight
        answered, written, finished = upstream.finished, upstream.written, self.finished
        reply = await self._run_script(
            int(1000 * LEASE_S), int(report.can_lead), most, report.waiting,
            answered - self._answered, written - self._written,
            "" if report.limit is None else report.limit, orjson.dumps(report.shown),
            upstream.model, "" if report.quiet is None else _as_text(report.quiet),
        )  # fmt: skip
        leads, limit, share, peers, busy, counted, tokens, shown, quiet = reply
        if self.latest is None or counted < self._counted:
            # The count began before this worker, or again: `finished` goes on without a jump.
            self._began_at = counted - finished
        self._answered, self._written, self._counted = answered, written, counted
        known_limit = None if limit < 0 else limit
        self.latest = Lease(
            bool(leads), known_limit, share, peers, busy, tokens, _as_dict(shown), _as_quiet(quiet)
        )
        self._renewed_at = time.monotonic()

    async def _run_script(self, *args: Any) -> Any:
        return await self._client.run_script("server_share", self._address, self._worker, *args)


def _as_text(quiet: Quiet) -> str:
    return " ".join("-" if value is None else f"{value:.6f}" for value in quiet)


def _as_quiet(text: bytes) -> Quiet:
    """Read what `_as_text` has written; values that are no times are unknown."""
    first, _, between = text.decode(errors="replace").partition(" ")
    return _seconds(first), _seconds(between)


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _as_dict(text: bytes) -> dict[str, Any]:
    try:
        shown = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return shown if isinstance(shown, dict) else {}
