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
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from contract import naming
from contract.errors import WarmqError
from contract.redis.history import HistoryReads, Minute
from contract.results import outcome_of, read_meta
from contract.streaming import Listener
from gateway.batches.api import batches as api
from gateway.batches.api.protocol import part_ids
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, json_error
from gateway.http.services import Services
from gateway.page.batches import from_history, row_of
from gateway.page.fleet import read_fleet
from gateway.page.rendering import HEADERS
from gateway.page.view import token_in
from gateway.redis.batch_views import BatchViews

log = logging.getLogger(__name__)

#: Seconds between two reads of batches, and number of these reads for each read of the workers,
#: which announce themselves once a second.
TICK_S, FLEET_EVERY = 0.5, 2
#: Seconds over which rates are a mean, and fewest seconds for which there is a rate.
RATES_S, MIN_RATE_S = 10.0, 3.0
#: Seconds between two writes of a worker into its history.
HISTORY_S = 10.0
#: Most batches of one viewer, most batches in one read for all viewers, and most workers that are
#: sent.
MAX_BATCHES, MAX_READ, MAX_WORKERS = 25, 100, 100
#: Seconds between two keep-alive comments, between two checks of a session or of a request's end,
#: and between two reads of a request's text.
KEEP_ALIVE_S, CHECK_S, TEXT_S = 10.0, 2.0, 0.3
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
        self._history: dict[str, tuple[float, Sequence[Minute]]] = {}

    def check(self, caller: Caller, session: str) -> None:
        """Raise ApiError (503) if one more stream would exceed a limit."""
        of_session = sum(one.session == session for one in self._viewers)
        of_tenant = sum(one.tenant == caller.tenant for one in self._viewers)
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
                if tick % FLEET_EVERY == 0:
                    fleet = await run_in_threadpool(self._read_fleet)
                state = fleet | await run_in_threadpool(self._read_batches, self._next_batches())
                for viewer in tuple(self._viewers):
                    viewer.offer(state)
            except Exception as error:  # a page then shows that it is not live
                self._lost(error)
            tick += 1
            await asyncio.sleep(TICK_S)

    def _lost(self, error: Exception) -> None:
        known = isinstance(error, WarmqError)
        message, traceback = (error, None) if known else ("a bug in this gateway", error)
        extra = {"action": "no_pages"}
        log.warning("pages are not live: %s", message, exc_info=traceback, extra=extra)
        for viewer in tuple(self._viewers):
            viewer.unsent[LOST] = b"{}"
            viewer.sent.pop(FLEET, None)
            viewer.changed.set()

    def _next_batches(self) -> Sequence[tuple[str, str]]:
        """Return the (tenant, batch id) pairs to read now; too many pairs take turns."""
        pairs = {(v.tenant, batch_id): None for v in self._viewers for batch_id in v.batches}
        found = list(pairs)
        if len(found) <= MAX_READ:
            return found
        self._next = (self._next + MAX_READ) % len(found)
        return (found + found)[self._next : self._next + MAX_READ]

    def _read_batches(self, wanted: Iterable[tuple[str, str]]) -> State:
        reads, found = BatchViews.using(self._services.batches), {}
        for tenant, batch_id in wanted:
            view = reads.get(tenant, batch_id)
            row = row_of(view, time.time()) if view is not None else None
            if row is not None:
                row.update(self._from_history(row))
                # Values that only follow the clock are not a change: a batch without progress is
                # sent once.
                row["seconds"] = round(row["seconds"]) if row["done"] or row["ended"] else 0
                found[(tenant, batch_id)] = orjson.dumps(row)
        return found

    def _from_history(self, row: dict[str, Any]) -> dict[str, float | None]:
        """Return values from the history of a batch's queues, which is cached for HISTORY_S."""
        now, reads = time.monotonic(), HistoryReads.using(self._services.batches)
        self._history = {q: v for q, v in self._history.items() if now - v[0] < HISTORY_S}
        for queue in row["queues"]:
            if queue not in self._history:
                self._history[queue] = now, reads.day([queue])
        found = from_history(row, {q: minutes for q, (_, minutes) in self._history.items()})
        return {name: None if one is None else round(one, 3) for name, one in found.items()}

    def _read_fleet(self) -> State:
        fleet = read_fleet(self._services, Caller())
        shown = ("id", "state", "slots", "in_flight", "running")
        state = {
            "waiting": fleet.waiting,
            "slots": fleet.slots,
            "running": sum(worker["running"] for worker in fleet.alive),
            "workers": len(fleet.alive),
            **self._rates({worker["id"]: worker["done"] for worker in fleet.alive}),
            "each": [{name: w[name] for name in shown} for w in fleet.workers[:MAX_WORKERS]],
        }
        return {FLEET: orjson.dumps(state)}

    def _rates(self, totals: dict[str, dict[str, int]]) -> dict[str, float | None]:
        """Return the rates per second of living workers, from the totals that they announce."""
        now = time.monotonic()
        self._totals.append((now, totals))
        while len(self._totals) > 2 and now - self._totals[1][0] >= RATES_S:
            self._totals.popleft()
        since, before = self._totals[0]
        seconds = now - since
        if seconds < MIN_RATE_S:
            return {"out_s": None, "in_s": None, "requests_s": None, "cached": None}
        sums = {
            name: sum(
                max(0, done.get(name, 0) - before.get(worker, done).get(name, 0))
                for worker, done in totals.items()
            )
            for name in _COUNTS
        }
        read, cached = sums["prompt_tokens"], sums["cached_tokens"]
        return {
            "out_s": round(sums["completion_tokens"] / seconds, 1),
            "in_s": round(read / seconds, 1),
            "cached": round(min(1.0, cached / read), 3) if read else None,
            "requests_s": round((sums["completed"] + sums["other"]) / seconds, 1),
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
    viewer = Viewer(caller.tenant, tuple(dict.fromkeys(ids))[:MAX_BATCHES], token)
    text = None
    custom_id, batch_id = (request.query_params.get(name, "") for name in ("request", "of"))
    try:
        feed.check(caller, token)
        if custom_id and batch_id:
            text = LiveText(services, caller, batch_id, custom_id)
            await run_in_threadpool(text.find)
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
                events += await text.events()
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


async def _is_valid(services: Services, session: str) -> bool:
    """Return whether a session and its key are valid; True if Redis is unreachable."""
    try:
        digest = await services.sessions.key_digest(session)
        (found,) = await services.lookup.find([digest])
    except WarmqError:
        return True
    return found.key is not None


class LiveText:
    """Reads the text of one request while its worker writes and publishes it."""

    def __init__(self, services: Services, caller: Caller, batch_id: str, custom_id: str) -> None:
        self._services, self._caller = services, caller
        self._batch_id, self._custom_id = batch_id, custom_id
        self._listener: Listener | None = None
        self._found_at = self._checked_at = 0.0
        self._sent = (0, "", "")

    def find(self) -> None:
        """Subscribe to the request in each queue batch of its batch, if these are known.

        Raises ApiError (404) if the caller has no such batch.
        """
        self._found_at = time.monotonic()
        view = api.view_of(self._services, self._caller, self._batch_id)
        ids = [naming.request_id(part, self._custom_id) for part in part_ids(view)]
        self._listener = self._services.batches.listener(*ids) if ids else None

    async def events(self) -> list[bytes]:
        """Return an event with the whole text, if it has changed."""
        try:
            found = await run_in_threadpool(self._read)
        except (WarmqError, ApiError):
            return []  # other events of the stream report this
        except Exception:
            log.exception("the text of a request cannot be read", extra={"action": "no_pages"})
            return []
        if found == self._sent:
            return []
        self._sent = found
        attempt, text, ended = found
        return [_event("text", orjson.dumps({"attempt": attempt, "text": text, "ended": ended}))]

    def _read(self) -> tuple[int, str, str]:
        if self._listener is None and time.monotonic() - self._found_at > CHECK_S:
            self.find()
        if self._listener is None:
            return self._sent
        self._listener.read(0)
        self._check_end(self._listener)
        found = self._listener.transcripts.values()
        latest = max(found, key=lambda t: (t.attempt, bool(t.ended), len(t.texts.get(0, ""))))
        return latest.attempt, latest.texts.get(0, ""), latest.ended

    def _check_end(self, listener: Listener) -> None:
        """Look up results every CHECK_S: each is published once, and may have been missed."""
        texts, now = listener.transcripts, time.monotonic()
        if now - self._checked_at < CHECK_S or any(text.ended for text in texts.values()):
            return
        self._checked_at = now
        for text, raw in zip(texts.values(), self._services.batches.results([*texts]), strict=True):
            if raw is not None:
                text.ended = outcome_of(read_meta(raw))

    def close(self) -> None:
        """End the subscription."""
        if self._listener is not None:
            self._listener.close()
