"""`Idempotency-Key` on POST: a retry gets the first try's answer, and nothing is done twice.

A try is known again by its caller, its path and the key. scope["warmq.idempotency"] is a text of
these three and of the content, '' without the header: batches and online requests derive their ids
from it. So another content never has what was made of the first one, also when this module has
forgotten that: after an error that may pass, or a day. scope["warmq.remembered"] says that an
answer is a first try's, which is stored.

JSON bodies are read and compared here. Multipart bodies are not, because clients choose another
boundary for each try: who has read the content calls `replayed_response` with its digest. Their ids
are chosen before, so what is made of them keeps the digest, and another one is a conflict.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.errors import StoreUnavailable
from contract.openai.body import BODY_TYPES
from gateway.http.bodies import replaying, takes_large, whole_body
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, api_error, send_error
from gateway.redis.idempotency import LEASE_MS, Answer, IdempotencyState, IdempotencyStore, Renewals
from gateway.redis.leases import Leases

log = logging.getLogger(__name__)

#: What an Idempotency-Key may be at most, in characters.
LONGEST_KEY = 255
#: Larger answers are not kept beside their object: the retry asks the resource again, which
#: derives the same ids.
LARGEST_ANSWER = 64 * 1024
#: Retries that come while the first is at it are told to come again after so long.
AFTER_S = 1.0
#: What is asked online, and the types of its bodies. Lines of a batch may also name vLLM's aliases.
ONLINE_BODY_TYPES = {
    url: body for url, body in BODY_TYPES.items() if url not in ("/score", "/rerank", "/v2/rerank")
}
#: Requests for these attach themselves to the first one's, by their ids (online/).
ONLINE_PATHS = frozenset(ONLINE_BODY_TYPES)
_KEPT_HEADERS = frozenset((b"content-type", b"location"))


class Try:
    """One try of a POST that has a key; `owned` while it is the one whose answer counts."""

    def __init__(self, tries: IdempotencyStore, name: str, attaches: bool) -> None:
        self._tries = tries
        self._name = name
        self._token = secrets.token_hex(8)
        self._attaches = attaches
        self.owned = False
        #: What its lease is renewed by.
        self.job = name, self._token

    async def begin(self, content: str) -> Answer | None:
        """Begin, or tell the content's digest of a try that has begun ('' is not known yet).

        Returns:
            The first try's answer, where it was stored.

        Raises:
            ApiError: 409, the key came with another content, or another try is at it now.
        """
        begun = await self._tries.begin(self._name, content, self._token)
        self.owned = begun.state == "new"
        if begun.state == "other":
            raise conflict()
        if begun.state == "running" and not self._attaches:
            raise _still_running(begun)
        return begun.answer

    async def end(self, status: int, answer: Answer | None) -> None:
        """End it with a status (0: no answer was sent) and what is to be stored.

        Errors that may pass are forgotten: the retry is the first then.
        """
        if not self.owned:
            return
        self.owned = False
        try:
            if status in (0, 408, 409, 429, 499) or status >= 500:
                await self._tries.forget(self._name, self._token)
            else:
                await self._tries.finish(self._name, self._token, answer)
        except StoreUnavailable as error:
            log.warning(
                "an answer is not kept for its Idempotency-Key: %s",
                error.message,
                extra={"action": "idempotency"},
            )


def conflict() -> ApiError:
    """Return the error of a key that came with two different requests."""
    return ApiError(
        409, "this Idempotency-Key was used for another request: use a new one for a new "
        "request, and the same body for a retry",
        code="idempotency_conflict", param="Idempotency-Key", retry=False,
    )  # fmt: skip


def _still_running(begun: IdempotencyState) -> ApiError:
    return ApiError(
        409, "the first request with this Idempotency-Key is still running; try again",
        code="idempotency_in_progress", param="Idempotency-Key", retry=True, after_s=AFTER_S,
    )  # fmt: skip


async def replayed_response(request: Request, digest: str) -> Response | None:
    """Tell what a multipart request contains: `digest` of all that shapes what it makes.

    The handler calls it once, when it has read all and before it makes anything. Without an
    Idempotency-Key it does nothing.

    Returns:
        The answer of the first try, which the handler returns, leaving nothing behind; None if it
        is to go on.

    Raises:
        ApiError: 409, the key came with another content, or another try is at it now.
    """
    mine: Try | None = request.scope.get("warmq.try")
    earlier = await mine.begin(digest) if mine is not None else None
    return _response(earlier) if earlier is not None else None


def _response(earlier: Answer) -> Response:
    headers = {**earlier.headers, "idempotent-replayed": "true"}
    return Response(earlier.body, earlier.status, headers)


class Idempotency:
    """Looks at the Idempotency-Key of each POST; others pass."""

    def __init__(self, app: ASGIApp, tries: IdempotencyStore, renewals: Renewals) -> None:
        self._app = app
        self._tries = tries
        self._leases: Leases[tuple[str, str]] = Leases(renewals.renew, LEASE_MS / 1000)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        key = b""
        if scope["type"] == "http":
            scope["warmq.idempotency"] = ""
            if scope["method"] == "POST":
                key = scope["warmq.headers"].get(b"idempotency-key", b"")
        if not key:
            await self._app(scope, receive, send)
            return
        try:
            await self._keyed(key.decode("latin-1"), scope, receive, send)
        except (ApiError, StoreUnavailable) as error:
            await send_error(scope, receive, send, api_error(error))

    async def _keyed(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        if len(key) > LONGEST_KEY or not (key.isascii() and key.isprintable()):
            raise ApiError(
                400, f"Idempotency-Key must have 1 to {LONGEST_KEY} printable ASCII characters",
                code="invalid_value", param="Idempotency-Key",
            )  # fmt: skip
        path: str = scope["path"]
        caller: Caller = scope["warmq.caller"]
        who = caller.key_id or caller.tenant
        name = hashlib.sha256(f"{who}\0{path}\0{key}".encode()).hexdigest()
        mine = Try(self._tries, name, path in ONLINE_PATHS)
        scope["warmq.idempotency"], scope["warmq.try"] = name, mine
        content = ""
        if not takes_large(path):
            body = await whole_body(receive)
            if body is None:  # the client has gone
                return
            # The query shapes what is made, too.
            content = hashlib.sha256(scope["query_string"] + b"\0" + body).hexdigest()
            scope["warmq.idempotency"] = hashlib.sha256(f"{name}\0{content}".encode()).hexdigest()
            receive = replaying(body, receive)
            del body  # whoever reads it holds it
        scope["warmq.remembered"] = False  # what is answered without a first try stores nothing
        earlier = await mine.begin(content)
        if earlier is not None:
            await _response(earlier)(scope, receive, send)
            return
        scope["warmq.remembered"] = True
        await self._first(mine, scope, receive, send)

    async def _first(self, mine: Try, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and remember how it was answered."""
        held = None
        try:
            held = self._leases.hold(mine.job) if mine.owned else None
            await self._app(scope, receive, _Kept(mine, send))
        finally:
            if held is not None:
                self._leases.drop(held)
            # It had no whole answer. Shielded: a client that goes cancels its request.
            await asyncio.shield(mine.end(0, None))


class _Kept:
    """Passes an answer on; before its end it is stored, if it is short and no stream."""

    def __init__(self, mine: Try, send: Send) -> None:
        self._mine = mine
        self._send = send
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body: bytearray | None = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(message)
        elif message["type"] == "http.response.body":
            if self._body is not None:
                self._body += message.get("body", b"")
                if len(self._body) > LARGEST_ANSWER:
                    self._body = None
            if not message.get("more_body", False):
                # Before the client has it whole: it may ask again at once.
                kept = self._body
                whole = None if kept is None else Answer(self._status, self._headers, bytes(kept))
                await self._mine.end(self._status, whole)
        await self._send(message)

    def _start(self, message: Any) -> None:
        self._status = message["status"]
        for name, value in message["headers"]:
            if name.lower() in _KEPT_HEADERS:
                self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        if self._headers.get("content-type", "").startswith("text/event-stream"):
            self._body = None
