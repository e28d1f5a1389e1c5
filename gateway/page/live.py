"""What moves on the pages: read once for all viewers, and not at all while nobody looks; `/ui/live`
is one stream of events a viewer, for as long as who opened it is logged in.

A viewer has one stream. It is sent what has changed since it was last sent something, so that one
that reads slowly holds nothing up and misses nothing that still counts.
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
from contract.redis.history import Minute
from contract.results import outcome_of, read_meta
from contract.streaming import Listener
from gateway.batches.api import batches as api
from gateway.batches.api.protocol import part_ids
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, json_error
from gateway.http.services import Services
from gateway.page.batches import by_rings, rings_of, row_of
from gateway.page.fleet import read_fleet
from gateway.page.rendering import HEADERS
from gateway.page.view import token_in
from gateway.redis.batch_views import BatchViews

log = logging.getLogger(__name__)

#: Between two looks, in seconds; the fleet is looked at every other time, as workers announce
#: themselves once a second.
TICK_S, FLEET_EVERY = 0.5, 2
#: Over how many seconds the rates go, and of how many there is one.
RATES_S, LEAST_S = 10.0, 3.0
#: Workers write what they did into the rings so often.
WRITE_S = 10.0
#: Batches that one viewer watches, those that are read in one look of all viewers', and workers
#: whose state is sent.
MOST_WATCHED, MOST_READ, MOST_WORKERS = 25, 100, 100
#: A sign of life, a look whether the session still is one or a request has ended, and between two
#: looks for text.
ALIVE_S, CHECK_S, TEXT_S = 10.0, 2.0, 0.3
#: After so long a viewer has to connect anew, which browsers do by themselves.
LONGEST_S = 3600.0
#: Streams in one process, of one tenant and of one session: a tab that shows a batch has one.
MOST_VIEWERS, MOST_OF_TENANT, MOST_OF_SESSION = 1000, 250, 25
_RATES = ("completed", "other", "prompt_tokens", "completion_tokens", "cached_tokens")


@dataclass(eq=False, slots=True)
class Viewer:
    """One stream: whose it is, which batches it watches, what it was sent last."""

    tenant: str
    batches: tuple[str, ...]
    news: asyncio.Event = field(default_factory=asyncio.Event)
    fleet: bytes = b""
    rows: dict[str, bytes] = field(default_factory=dict)
    unsent: dict[str, bytes] = field(default_factory=dict)
    session: str = ""

    def offer(self, fleet: bytes, rows: dict[tuple[str, str], bytes]) -> None:
        """Take in what is now; wake up if something is new."""
        if fleet and fleet != self.fleet:
            self.fleet = self.unsent["fleet"] = fleet
        for batch_id in self.batches:
            row = rows.get((self.tenant, batch_id))
            if row is not None and row != self.rows.get(batch_id):
                self.rows[batch_id] = self.unsent[f"batch {batch_id}"] = row
        if self.unsent:
            self.news.set()

    def take(self) -> list[tuple[str, bytes]]:
        """Return what is to be sent: (event, JSON)."""
        self.news.clear()
        found = [(name.partition(" ")[0], data) for name, data in self.unsent.items()]
        self.unsent.clear()
        return found


class LiveFeed:
    """Reads Redis for all viewers of this process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._seen: deque[tuple[float, dict[str, dict[str, int]]]] = deque()
        self._from = 0
        self._rings: dict[str, tuple[float, Sequence[Minute]]] = {}

    @property
    def viewers(self) -> int:
        """How many look."""
        return len(self._viewers)

    def viewers_of(self, session: str, tenant: str) -> tuple[int, int]:
        """How many of them are of a session, and of a tenant."""
        of_session = sum(one.session == session for one in self._viewers)
        return of_session, sum(one.tenant == tenant for one in self._viewers)

    @property
    def reading(self) -> bool:
        """Whether anything is read now."""
        return self._task is not None and not self._task.done()

    def enter(self, viewer: Viewer) -> None:
        """Begin to tell a viewer."""
        self._viewers.add(viewer)
        if not self.reading:
            self._seen.clear()
            self._task = asyncio.create_task(self._look())

    def leave(self, viewer: Viewer) -> None:
        """End it; the last one ends the looking."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None  # whoever enters before it has ended begins anew

    async def _look(self) -> None:
        tick, fleet = 0, b""
        while True:
            try:
                if tick % FLEET_EVERY == 0:
                    fleet = await run_in_threadpool(self._read_fleet)
                rows = await run_in_threadpool(self._read_batches, self._wanted())
                for viewer in tuple(self._viewers):
                    viewer.offer(fleet, rows)
            except Exception as error:  # the pages say that they are not live
                self._lost(error)
            tick += 1
            await asyncio.sleep(TICK_S)

    def _lost(self, error: Exception) -> None:
        told = error.message if isinstance(error, WarmqError) else "a fault of this gateway"
        fault = None if isinstance(error, WarmqError) else error
        log.warning(
            "the pages are not live: %s", told, exc_info=fault, extra={"action": "no_pages"}
        )
        for viewer in tuple(self._viewers):
            viewer.unsent["lost"] = b"{}"
            viewer.fleet = b""
            viewer.news.set()

    def _wanted(self) -> Sequence[tuple[str, str]]:
        """Return which batches to read now, in turn if they are many."""
        pairs = {(v.tenant, batch_id): None for v in self._viewers for batch_id in v.batches}
        found = list(pairs)
        if len(found) <= MOST_READ:
            return found
        self._from = (self._from + MOST_READ) % len(found)
        return (found + found)[self._from : self._from + MOST_READ]

    def _read_batches(self, wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], bytes]:
        reads, found = BatchViews.using(self._services.batches), {}
        for tenant, batch_id in wanted:
            view = reads.get(tenant, batch_id)
            row = row_of(view, time.time()) if view is not None else None
            if row is not None:
                # What follows from the clock alone is no news: a batch of which nothing moves is
                # sent once.
                row.update(self._by_rings(row))
                row["seconds"] = round(row["seconds"]) if row["done"] or row["ended"] else 0
                found[(tenant, batch_id)] = orjson.dumps(row)
        return found

    def _by_rings(self, row: dict[str, Any]) -> dict[str, float | None]:
        """Return a batch's; the rings of its queues are read again when workers have written."""
        now = time.monotonic()
        self._rings = {q: found for q, found in self._rings.items() if now - found[0] < WRITE_S}
        for queue in row["queues"]:
            if queue not in self._rings:
                read = rings_of(self._services, [row | {"queues": [queue], "created_at": 0}])
                self._rings[queue] = now, read[queue]
        found = by_rings(row, {q: minutes for q, (_, minutes) in self._rings.items()})
        return {name: None if one is None else round(one, 3) for name, one in found.items()}

    def _read_fleet(self) -> bytes:
        fleet = read_fleet(self._services, Caller())
        rates = self._rates({worker["id"]: worker["done"] for worker in fleet.alive})
        shown = ("id", "state", "slots", "in_flight", "running")
        return orjson.dumps({
            "waiting": fleet.waiting,
            "slots": fleet.slots,
            "running": sum(worker["running"] for worker in fleet.alive),
            "workers": len(fleet.alive),
            **rates,
            "each": [{name: w[name] for name in shown} for w in fleet.workers[:MOST_WORKERS]],
        })  # fmt: skip

    def _rates(self, totals: dict[str, dict[str, int]]) -> dict[str, float | None]:
        """Return what living workers do a second, by two of their announcements."""
        now = time.monotonic()
        self._seen.append((now, totals))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATES_S:
            self._seen.popleft()
        since, before = self._seen[0]
        seconds = now - since
        sums = dict.fromkeys(_RATES, 0)
        for worker, done in totals.items():
            for name in _RATES:
                then = before.get(worker, done).get(name, 0)
                sums[name] += max(0, done.get(name, 0) - then)
        if seconds < LEAST_S:  # of two looks it would be anything
            return {"out_s": None, "in_s": None, "requests_s": None, "cached": None}
        read, cached = sums["prompt_tokens"], sums["cached_tokens"]
        return {
            "out_s": round(sums["completion_tokens"] / seconds, 1),
            "in_s": round(sums["prompt_tokens"] / seconds, 1),
            "cached": round(min(1.0, cached / read), 3) if read else None,
            "requests_s": round((sums["completed"] + sums["other"]) / seconds, 1),
        }


def event(name: str, data: bytes) -> bytes:
    """Return one event of a stream; JSON has no line breaks."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


async def live(request: Request) -> Response:
    """Answer with a stream: the fleet, the batches of `batches`, the text of `request`."""
    app, services = request.app, request.app.state.services
    watch: LiveFeed | None = getattr(app.state, "dashboard_watch", None)
    if watch is None:
        watch = app.state.dashboard_watch = LiveFeed(services)
    caller: Caller = request.scope["warmq.caller"]
    token = token_in(request.scope["warmq.headers"]) if caller.key_id else ""
    if (refused := _too_many(watch, caller, token)) is not None:
        return json_error(refused, HEADERS)
    ids = [one[:200] for one in request.query_params.get("batches", "").split(",") if one]
    viewer = Viewer(caller.tenant, tuple(dict.fromkeys(ids))[:MOST_WATCHED], session=token)
    text = None
    custom_id, batch_id = (request.query_params.get(name, "") for name in ("request", "of"))
    if custom_id and batch_id:
        text = LiveText(services, caller, batch_id, custom_id)
        try:
            await run_in_threadpool(text.find)
        except ApiError as error:
            return json_error(error, HEADERS)
    headers = HEADERS | {"x-accel-buffering": "no"}
    if request.method == "HEAD":  # a stream has no end, and HEAD's client waits for none
        return Response(headers=headers, media_type="text/event-stream")
    events = _events(services, watch, viewer, token, text)
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


def _too_many(watch: LiveFeed, caller: Caller, token: str) -> ApiError | None:
    """Return why a stream is not opened: its session, tenant or all have as many as they may."""
    of_session, of_tenant = watch.viewers_of(token, caller.tenant)
    if caller.key_id and of_session >= MOST_OF_SESSION:
        told = f"this session has {MOST_OF_SESSION} live pages open, the most; close some"
    elif caller.key_id and of_tenant >= MOST_OF_TENANT:
        told = f"this tenant has {MOST_OF_TENANT} live pages open, the most; try again"
    elif watch.viewers >= MOST_VIEWERS:
        told = "too many people look; try again"
    else:
        return None
    return ApiError(503, told, after_s=10)


async def _events(
    services: Services, watch: LiveFeed, viewer: Viewer, token: str, text: LiveText | None
) -> AsyncIterator[bytes]:
    began = said = checked = time.monotonic()
    yield b"retry: 2000\n\n"
    watch.enter(viewer)
    try:
        while (now := time.monotonic()) - began < LONGEST_S:
            if token and now - checked >= CHECK_S:
                checked = now
                if not await _still_in(services, token):
                    yield event("out", b"{}")
                    return
            pieces = [event(name, data) for name, data in viewer.take()]
            if text is not None:
                pieces += await text.news()
            if not pieces and now - said >= ALIVE_S:
                pieces = [b": still here\n\n"]
            if pieces:
                said = now
                yield b"".join(pieces)
            with suppress(TimeoutError):
                wait_s = TEXT_S if text is not None else CHECK_S
                async with asyncio.timeout(wait_s):
                    await viewer.news.wait()
    finally:
        watch.leave(viewer)
        if text is not None:
            text.close()


async def _still_in(services: Services, token: str) -> bool:
    """Return whether a session has not ended, nor its key been revoked; yes while Redis is away."""
    try:
        digest = await services.sessions.key_digest(token)
        (found,) = await services.lookup.find([digest])
    except WarmqError:
        return True
    return found.key is not None


class LiveText:
    """The text of one request while it is written, as its worker tells it."""

    def __init__(self, services: Services, caller: Caller, batch_id: str, custom_id: str) -> None:
        self._services, self._caller = services, caller
        self._batch_id, self._custom_id = batch_id, custom_id
        self._listener: Listener | None = None
        self._found = self._looked = 0.0
        self._sent = (0, "", "")

    def find(self) -> None:
        """Find out where the request is; nowhere, while its batch is looked through.

        Raises:
            ApiError: 404, if the caller has no such batch.
        """
        self._found = time.monotonic()
        view = api.view_of(self._services, self._caller, self._batch_id)
        ids = [naming.request_id(part, self._custom_id) for part in part_ids(view)]
        self._listener = self._services.batches.listener(*ids) if ids else None

    async def news(self) -> list[bytes]:
        """Return an event with the whole text, if it has changed."""
        try:
            found = await run_in_threadpool(self._read)
        except (WarmqError, ApiError):
            return []  # the fleet's stream says that Redis is away, the page that a batch is gone
        except Exception:
            log.exception("the text of a request cannot be read", extra={"action": "no_pages"})
            return []
        if found == self._sent:
            return []
        self._sent = found
        attempt, said, ended = found
        return [event("text", orjson.dumps({"attempt": attempt, "text": said, "ended": ended}))]

    def _read(self) -> tuple[int, str, str]:
        if self._listener is None and time.monotonic() - self._found > CHECK_S:
            self.find()
        if self._listener is None:
            return self._sent
        self._listener.read(0)
        self._look_for_end(self._listener)
        found = self._listener.transcripts.values()
        whole = max(found, key=lambda t: (t.attempt, bool(t.ended), len(t.texts.get(0, ""))))
        return whole.attempt, whole.texts.get(0, ""), whole.ended

    def _look_for_end(self, listener: Listener) -> None:
        """Look for a result now and then: it is published once, and who is not there misses it."""
        texts, now = listener.transcripts, time.monotonic()
        if now - self._looked < CHECK_S or any(text.ended for text in texts.values()):
            return
        self._looked = now
        for text, raw in zip(texts.values(), self._services.batches.results([*texts]), strict=True):
            if raw is not None:
                text.ended = outcome_of(read_meta(raw))

    def close(self) -> None:
        """Hear nothing more."""
        if self._listener is not None:
            self._listener.close()
