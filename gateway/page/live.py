"""Serves `/ui/live`: server-sent events that keep an open page up to date.

One task reads Redis for all viewers, and only while there is a viewer (an open stream). A viewer
gets the changes since its last event: so a slow viewer does not delay another one, and still gets
the latest state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from contract.errors import WarmqError
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, json_error
from gateway.http.services import Services
from gateway.page.batches import row_of
from gateway.page.estimates import estimates
from gateway.page.fleet import read_fleet
from gateway.page.live_text import CHECK_S, LiveText, Text
from gateway.page.rendering import HEADERS
from gateway.page.view import token_in
from gateway.redis.batch_views import BatchViews
from producer.rates import Window
from producer.time_left import Outlook, OutlookReads

log = logging.getLogger(__name__)

#: Seconds between two reads of batches, and number of these reads for each read of the workers,
#: which announce themselves once a second.
TICK_S, FLEET_EVERY = 0.5, 2
#: Seconds over which workers' rates are a mean, and fewest seconds for which there is a rate.
RATES_S, MIN_RATE_S = 10.0, 3.0
#: Seconds between two reads of what times left need.
OUTLOOKS_S = 1.0
#: Most batches of one viewer, most batches in one read for all viewers, and most workers that are
#: sent.
MAX_BATCHES, MAX_READ, MAX_WORKERS = 25, 100, 100
#: Seconds between two keep-alive comments, and between two reads of a request's text.
KEEP_ALIVE_S, TEXT_S = 10.0, 0.3
#: Seconds after which a stream ends; the browser then connects again by itself.
MAX_STREAM_S = 3600.0
#: Most streams of one process, one tenant, and one session; each tab that shows a batch has one.
MAX_VIEWERS, MAX_OF_TENANT, MAX_OF_SESSION = 1000, 250, 25
_COUNTS = ("completed", "other", "prompt_tokens", "completion_tokens", "cached_tokens")


#: (tenant, batch id) -> the JSON of the batch; FLEET -> the JSON of the workers.
State = dict[tuple[str, str], bytes]
FLEET, LOST = ("fleet", ""), ("lost", "")


@dataclass(eq=False, slots=True)
class Viewer:
    """One stream: its tenant, session and batches, and the state that was sent."""

    tenant: str
    batches: tuple[str, ...]
    session: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    sent: State = field(default_factory=dict)
    unsent: State = field(default_factory=dict)

    def offer(self, state: State) -> None:
        """Note the current state; wake up the stream if it has changed."""
        for key in (FLEET, *((self.tenant, batch_id) for batch_id in self.batches)):
            if key in state and state[key] != self.sent.get(key):
                self.sent[key] = self.unsent[key] = state[key]
        if self.unsent:
            self.changed.set()

    def take(self) -> list[bytes]:
        """Return the events to send."""
        self.changed.clear()
        events = [_event("batch" if key[1] else key[0], data) for key, data in self.unsent.items()]
        self.unsent.clear()
        return events


class LiveFeed:
    """Reads Redis for all viewers of this process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._totals: deque[tuple[float, dict[str, dict[str, int]]]] = deque()
        self._next = 0
        self._outlooks: dict[str, tuple[float, Outlook | None]] = {}
        self._done: dict[tuple[str, str], Window] = {}

    def check(self, caller: Caller, session: str) -> None:
        """Raise ApiError (503) if one more stream would exceed a limit."""
        of_session = sum(one.session == session for one in self._viewers)
        of_tenant = sum(one.tenant == caller.only_tenant for one in self._viewers)
        limits = (
            ("session", of_session, MAX_OF_SESSION),
            ("tenant", of_tenant, MAX_OF_TENANT),
            ("gateway", len(self._viewers), MAX_VIEWERS),
        )
        for owner, count, limit in limits if caller.key_id else limits[-1:]:
            if count >= limit:
                message = (
                    f"this {owner} has {limit} live pages open, the limit; close some, or try again"
                )
                raise ApiError(503, message, after_s=10)

    @property
    def reading(self) -> bool:
        """Whether Redis is being read."""
        return self._task is not None and not self._task.done()

    def enter(self, viewer: Viewer) -> None:
        """Add a viewer; the first one starts the task that reads Redis."""
        self._viewers.add(viewer)
        if not self.reading:
            self._totals.clear()
            self._done.clear()
            self._task = asyncio.create_task(self._run())

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer; the last one ends the task that reads Redis."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None  # so that the next viewer starts another task immediately

    async def _run(self) -> None:
        tick, fleet = 0, State()
        while True:
            try:
                batches = await run_in_threadpool(self._read_batches, self._next_batches())
                if tick % FLEET_EVERY == 0:  # with the queues of these batches
                    fleet = await run_in_threadpool(self._read_fleet)
                state = fleet | batches
                for viewer in tuple(self._viewers):
                    viewer.offer(state)
            except Exception as error:  # a page then shows that it is not live
                self._note_lost(error)
            tick += 1
            await asyncio.sleep(TICK_S)

    def _note_lost(self, error: Exception) -> None:
        is_known = isinstance(error, WarmqError)
        message, traceback = (error, None) if is_known else ("a bug in this gateway", error)
        extra = {"action": "no_pages"}
        log.warning("pages are not live: %s", message, exc_info=traceback, extra=extra)
        for viewer in tuple(self._viewers):
            viewer.unsent[LOST] = b"{}"
            viewer.sent.pop(FLEET, None)
            viewer.changed.set()

    def _next_batches(self) -> Sequence[tuple[str, str]]:
        """Return the (tenant, batch id) pairs to read now; too many pairs take turns."""
        pairs = {(one.tenant, batch_id) for one in self._viewers for batch_id in one.batches}
        self._done = {pair: done for pair, done in self._done.items() if pair in pairs}
        in_order = sorted(pairs)
        if len(in_order) <= MAX_READ:
            return in_order
        self._next = (self._next + MAX_READ) % len(in_order)
        return (in_order + in_order)[self._next : self._next + MAX_READ]

    def _read_batches(self, pairs: Sequence[tuple[str, str]]) -> State:
        reads, batches = BatchViews.using(self._services.batches), {}
        for tenant, batch_id in pairs:
            batch_view = reads.get(tenant, batch_id)
            row = row_of(batch_view, time.time()) if batch_view is not None else None
            if row is not None:
                if row["ended"]:  # a retry begins anew
                    self._done.pop((tenant, batch_id), None)
                else:
                    row["rate"] = self._batch_rate((tenant, batch_id), row["done"])
                    # Values that only follow the clock are not a change: a batch without progress
                    # is sent once.
                    row["seconds"] = round(row["seconds"]) if row["done"] else 0
                row.update(self._estimates(row))
                for name in ("works", "submitted", "parts", "failures"):  # not for the page
                    del row[name]
                batches[(tenant, batch_id)] = orjson.dumps(row)
        return batches

    def _batch_rate(self, key: tuple[str, str], done: int) -> float | None:
        """Return a batch's requests/s in its window; None before MIN_RATE_S."""
        window = self._done.setdefault(key, Window())
        (rate,) = window.add(done)
        return round(rate, 1) if window.span >= MIN_RATE_S else None

    def _estimates(self, row: dict[str, Any]) -> dict[str, float | None]:
        """Return a row's estimates from its queues' outlooks, which are cached for OUTLOOKS_S."""
        now = time.monotonic()
        self._outlooks = {q: v for q, v in self._outlooks.items() if now - v[0] < OUTLOOKS_S}
        if missing := [queue for queue in row["queues"] if queue not in self._outlooks]:
            read = OutlookReads.using(self._services.batches).outlooks(missing)
            self._outlooks |= {queue: (now, outlook) for queue, outlook in read.items()}
        values = estimates(row, {queue: outlook for queue, (_, outlook) in self._outlooks.items()})
        return {name: None if one is None else round(one, 3) for name, one in values.items()}

    def _read_fleet(self) -> State:
        fleet = read_fleet(self._services, Caller(), self._outlooks)
        shown = ("id", "model", "state", "slots", "in_flight", "running")
        state: dict[str, Any] = {
            "waiting": fleet.waiting,
            "slots": fleet.slots,
            "running": fleet.running,
            "workers": len(fleet.seen),
            **self._fleet_rates({worker["id"]: worker["done"] for worker in fleet.alive}),
        }
        state["each"] = [
            {name: w[name] for name in shown} | {"out_s": self._worker_rate(w["id"])}
            for w in fleet.workers[:MAX_WORKERS]
        ]
        return {FLEET: orjson.dumps(state)}

    def _worker_rate(self, worker: str) -> float | None:
        """Return the tokens/s that a worker writes; None if it is not known yet."""
        now, totals = self._totals[-1]
        if worker not in totals:
            return None
        since, before = self._first_read(worker)
        if now - since < MIN_RATE_S:
            return None
        old, new = (done.get("completion_tokens", 0) for done in (before, totals[worker]))
        return round(max(0, new - old) / (now - since), 1)

    def _first_read(self, worker: str) -> tuple[float, dict[str, int]]:
        """Return the time and the totals of the oldest read with a worker."""
        reads = self._totals
        return next((then, totals[worker]) for then, totals in reads if worker in totals)

    def _fleet_rates(self, totals: dict[str, dict[str, int]]) -> dict[str, float | None]:
        """Return the rates per second of living workers, from the totals that they announce."""
        now = time.monotonic()
        self._totals.append((now, totals))
        while len(self._totals) > 2 and now - self._totals[1][0] >= RATES_S:
            self._totals.popleft()
        # A worker that has come since then has the rate of its own time.
        firsts = {worker: self._first_read(worker) for worker in totals}
        oldest = min((then for then, _ in firsts.values()), default=self._totals[0][0])
        if now - oldest < MIN_RATE_S:
            return {"out_s": None, "in_s": None, "requests_s": None, "cached": None}
        per_s = {
            name: sum(
                max(0, totals[worker].get(name, 0) - before.get(name, 0))
                / max(MIN_RATE_S, now - then)
                for worker, (then, before) in firsts.items()
            )
            for name in _COUNTS
        }
        read, cached = per_s["prompt_tokens"], per_s["cached_tokens"]
        return {
            "out_s": round(per_s["completion_tokens"], 1),
            "in_s": round(read, 1),
            "cached": round(min(1.0, cached / read), 3) if read else None,
            "requests_s": round(per_s["completed"] + per_s["other"], 1),
        }


def _event(name: str, data: bytes) -> bytes:
    """Return one server-sent event; JSON has no line breaks."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


async def live(request: Request) -> Response:
    """Stream the workers, the batches in `batches`, and the text of `request` in batch `of`."""
    app, services = request.app, request.app.state.services
    feed: LiveFeed | None = getattr(app.state, "live_feed", None)
    if feed is None:
        feed = app.state.live_feed = LiveFeed(services)
    caller: Caller = request.scope["warmq.caller"]
    token = token_in(request.scope["warmq.headers"]) if caller.key_id else ""
    ids = [one[:200] for one in request.query_params.get("batches", "").split(",") if one]
    viewer = Viewer(caller.only_tenant, tuple(dict.fromkeys(ids))[:MAX_BATCHES], token)
    text = None
    custom_id, batch_id = (request.query_params.get(name, "") for name in ("request", "of"))
    try:
        feed.check(caller, token)
        if custom_id and batch_id:
            text = LiveText(services, caller, batch_id, custom_id)
            await run_in_threadpool(text.subscribe)
    except ApiError as error:
        return json_error(error, HEADERS)
    headers = HEADERS | {"x-accel-buffering": "no"}
    if request.method == "HEAD":  # a stream has no end, and a HEAD client does not wait for one
        return Response(headers=headers, media_type="text/event-stream")
    events = _events(services, feed, viewer, text)
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


async def _events(
    services: Services, feed: LiveFeed, viewer: Viewer, text: LiveText | None
) -> AsyncIterator[bytes]:
    began = sent = checked = time.monotonic()
    yield b"retry: 2000\n\n"
    feed.enter(viewer)
    try:
        while (now := time.monotonic()) - began < MAX_STREAM_S:
            if viewer.session and now - checked >= CHECK_S:
                checked = now
                if not await _is_valid(services, viewer.session):
                    yield _event("out", b"{}")
                    return
            events = viewer.take()
            if text is not None:
                events += _text_events(await text.changed())
            if not events and now - sent >= KEEP_ALIVE_S:
                events = [b": still here\n\n"]
            if events:
                sent = now
                yield b"".join(events)
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S if text is None else TEXT_S):
                    await viewer.changed.wait()
    finally:
        feed.leave(viewer)
        if text is not None:
            text.close()


def _text_events(text: Text | None) -> list[bytes]:
    if text is None:
        return []
    state = dict(zip(("attempt", "text", "ended"), text, strict=True))
    return [_event("text", orjson.dumps(state))]


async def _is_valid(services: Services, session: str) -> bool:
    """Return whether a session and its key are valid; True if Redis is unreachable."""
    try:
        digest = await services.sessions.key_digest(session)
        (key_of_session,) = await services.lookup.find([digest])
    except WarmqError:
        return True
    return key_of_session.key is not None
