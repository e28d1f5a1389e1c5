"""`Idempotency-Key` on POST: a retry gets the first request's answer, and nothing is done twice.

A retry is recognised by caller, path and key. scope["warmq.idempotency"] is a text made of these
and the content ('' without the header), from which batches and online requests derive their ids.
So other content never gets what the first one made, even once the first answer is forgotten: after
a temporary error, or a day. scope["warmq.remembered"] states that an answer will be stored.

JSON bodies are read and compared here. Multipart bodies are not, as clients choose another boundary
for each retry: their handler calls `replayed_response` with the digest of their content.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.errors import StoreUnavailable
from contract.openai.body import BODY_TYPES
from gateway.http.bodies import replaying, takes_large, whole_body
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, api_error, send_error
from gateway.redis.idempotency import LEASE_MS, Answer, IdempotencyStore, Renewals
from gateway.redis.leases import Leases

log = logging.getLogger(__name__)

#: Characters of an Idempotency-Key at most.
LONGEST_KEY = 255
#: Bytes of an answer that is stored at most; a retry of a larger one reaches the handler, which
#: derives the same ids.
LARGEST_ANSWER = 64 * 1024
#: Seconds after which a retry may come that came while the first request was running.
AFTER_S = 1.0
#: Paths of online requests and the types of their bodies; lines of a batch may also name vLLM's
#: aliases. A retry of one waits with the first request for the same answer.
ONLINE_BODY_TYPES = {
    url: body for url, body in BODY_TYPES.items() if url not in ("/score", "/rerank", "/v2/rerank")
}
_STORED_HEADERS = frozenset((b"content-type", b"location"))


class KeyedRequest:
    """One POST with a key; `owned` while its answer is the one to store."""

    def __init__(self, store: IdempotencyStore, name: str, *, online: bool) -> None:
        self._store = store
        self._name = name
        self._token = secrets.token_hex(8)
        self._online = online
        self.owned = False
        #: Its claim, by which the lease is renewed.
        self.claim = name, self._token

    async def begin(self, content: str) -> Answer | None:
        """Begin; return the first request's answer, if it is stored.

        `content` is a digest, '' if unknown; call it again when it is known. Raises ApiError (409)
        if the key came with other content, or its first request is running.
        """
        begun = await self._store.begin(self._name, content, self._token)
        self.owned = begun.state == "new"
        if begun.state == "other":
            raise conflict()
        if begun.state == "running" and not self._online:
            raise ApiError(
                409, "the first request with this Idempotency-Key is still running; try again",
                code="idempotency_in_progress", param="Idempotency-Key", retry=True,
                after_s=AFTER_S,
            )  # fmt: skip
        return begun.answer

    async def end(self, status: int, answer: Answer | None) -> None:
        """End it with a status (0: no answer was sent), and store the answer.

        Temporary errors are not stored: the retry is the first request then.
        """
        if not self.owned:
            return
        self.owned = False
        try:
            if status in (0, 408, 409, 429, 499) or status >= 500:
                await self._store.forget(self._name, self._token)
            else:
                await self._store.finish(self._name, self._token, answer)
        except StoreUnavailable as error:
            log.warning(
                "an answer was not stored for its Idempotency-Key: %s", error.message,
                extra={"action": "idempotency"},
            )  # fmt: skip

    def storing(self, send: Send) -> Send:
        """Return a `send` that stores the answer before its end, if it is short and no stream."""
        status, headers, body = 0, dict[str, str](), bytearray()
        storable = True

        async def store(message: Message) -> None:
            nonlocal status, storable
            if message["type"] == "http.response.start":
                status = message["status"]
                for name, value in message["headers"]:
                    if name.lower() in _STORED_HEADERS:
                        headers[name.decode("latin-1").lower()] = value.decode("latin-1")
                storable = not headers.get("content-type", "").startswith("text/event-stream")
            elif message["type"] == "http.response.body":
                piece = message.get("body", b"")
                storable = storable and len(body) + len(piece) <= LARGEST_ANSWER
                if storable:
                    body.extend(piece)
                if not message.get("more_body", False):
                    # Before the client has all of it, as it may retry immediately.
                    answer = Answer(status, headers, bytes(body)) if storable else None
                    await self.end(status, answer)
            await send(message)

        return store


def conflict() -> ApiError:
    """Return the error of a key that came with two different requests."""
    return ApiError(
        409, "this Idempotency-Key was used for another request; use a new key for a new "
        "request, and the same body for a retry",
        code="idempotency_conflict", param="Idempotency-Key", retry=False,
    )  # fmt: skip


async def replayed_response(request: Request, digest: str) -> Response | None:
    """Return the first request's answer to a multipart request; None if the handler is to go on.

    The handler calls it once with a digest of all that shapes what the request makes, before it
    makes anything. Raises ApiError (409) as `KeyedRequest.begin` does.
    """
    keyed: KeyedRequest | None = request.scope.get("warmq.keyed_request")
    earlier = await keyed.begin(digest) if keyed is not None else None
    return _replayed(earlier) if earlier is not None else None


def _replayed(earlier: Answer) -> Response:
    headers = {**earlier.headers, "idempotent-replayed": "true"}
    return Response(earlier.body, earlier.status, headers)


class Idempotency:
    """Handles the Idempotency-Key of each POST that has one."""

    def __init__(self, app: ASGIApp, store: IdempotencyStore, renewals: Renewals) -> None:
        self._app = app
        self._store = store
        self._leases: Leases[tuple[str, str]] = Leases(renewals.renew, LEASE_MS / 1000)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        scope["warmq.idempotency"] = ""
        key = b""
        if scope.get("method") == "POST":
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
        name = _sha256(f"{caller.owner}\0{path}\0{key}".encode())
        keyed = KeyedRequest(self._store, name, online=path in ONLINE_BODY_TYPES)
        scope["warmq.idempotency"], scope["warmq.keyed_request"] = name, keyed
        content = ""
        if not takes_large(path):
            body = await whole_body(receive)
            if body is None:  # the client has gone
                return
            # The query shapes what is made, too.
            content = _sha256(scope["query_string"] + b"\0" + body)
            scope["warmq.idempotency"] = _sha256(f"{name}\0{content}".encode())
            receive = replaying(body, receive)
            # The handler holds it from here on.
            del body
        scope["warmq.remembered"] = False
        earlier = await keyed.begin(content)
        if earlier is not None:
            await _replayed(earlier)(scope, receive, send)
            return
        scope["warmq.remembered"] = True
        lease = None
        try:
            lease = self._leases.hold(keyed.claim) if keyed.owned else None
            await self._app(scope, receive, keyed.storing(send))
        finally:
            if lease is not None:
                self._leases.drop(lease)
            # If it had no whole answer. Shielded, as a client that goes cancels its request.
            await asyncio.shield(keyed.end(0, None))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
