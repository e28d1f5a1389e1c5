"""`/ui/live`: one stream of events a viewer, for as long as who opened it is logged in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from contract import naming
from contract.errors import WarmqError
from contract.streaming import Listener
from gateway.batches.api import batches as api
from gateway.batches.api.protocol import parts_of
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, answer
from gateway.http.page_session import token_in
from gateway.http.services import Services
from gateway.page.live import MOST_WATCHED, Viewer, Watch, event
from gateway.page.rendering import HEADERS

log = logging.getLogger(__name__)

#: A sign of life, a look whether the session still is one, and between two looks for text.
ALIVE_S, CHECK_S, TEXT_S = 10.0, 2.0, 0.3
#: After so long a viewer has to connect anew, which browsers do by themselves.
LONGEST_S = 3600.0
#: Streams in one process, of one tenant and of one session: a tab that shows a batch has one.
MOST_VIEWERS, MOST_OF_TENANT, MOST_OF_SESSION = 1000, 250, 25


async def live(request: Request) -> Response:
    """Answer with a stream: the fleet, the batches of `batches`, the text of `request`."""
    app, services = request.app, request.app.state.services
    watch: Watch | None = getattr(app.state, "dashboard_watch", None)
    if watch is None:
        watch = app.state.dashboard_watch = Watch(services)
    caller: Caller = request.scope["warmq.caller"]
    token = token_in(request.scope["warmq.headers"]) if caller.key_id else ""
    if (refused := _too_many(watch, caller, token)) is not None:
        return answer(refused, HEADERS)
    ids = [one[:200] for one in request.query_params.get("batches", "").split(",") if one]
    viewer = Viewer(caller.tenant, tuple(dict.fromkeys(ids))[:MOST_WATCHED], session=token)
    text = None
    custom_id, batch_id = (request.query_params.get(name, "") for name in ("request", "of"))
    if custom_id and batch_id:
        text = Text(services, caller, batch_id, custom_id)
        try:
            await run_in_threadpool(text.find)
        except ApiError as error:
            return answer(error, HEADERS)
    headers = HEADERS | {"x-accel-buffering": "no"}
    if request.method == "HEAD":  # a stream has no end, and HEAD's client waits for none
        return Response(headers=headers, media_type="text/event-stream")
    events = _events(services, watch, viewer, token, text)
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


def _too_many(watch: Watch, caller: Caller, token: str) -> ApiError | None:
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
    services: Services, watch: Watch, viewer: Viewer, token: str, text: Text | None
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
    return found.key is not None and found.key.revoked_at is None


class Text:
    """The text of one request while it is written, as its worker tells it."""

    def __init__(self, services: Services, caller: Caller, batch_id: str, custom_id: str) -> None:
        self._services, self._caller = services, caller
        self._batch_id, self._custom_id = batch_id, custom_id
        self._listener: Listener | None = None
        self._found = 0.0
        self._sent = (0, "", "")

    def find(self) -> None:
        """Find out where the request is; nowhere, while its batch is looked through.

        Raises:
            ApiError: 404, if the caller has no such batch.
        """
        self._found = time.monotonic()
        view = api.view_of(self._services, self._caller, self._batch_id)
        ids = [naming.request_id(part, self._custom_id) for part in parts_of(view)]
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
        found = self._listener.transcripts.values()
        whole = max(found, key=lambda t: (t.attempt, len(t.texts.get(0, ""))))
        return whole.attempt, whole.texts.get(0, ""), whole.ended

    def close(self) -> None:
        """Hear nothing more."""
        if self._listener is not None:
            self._listener.close()
