"""Handles `Idempotency-Key` on POST: a retry gets the first request's answer.

A retry has the same caller, path and key. scope["warmq.idempotency"] is a digest of these and of a
JSON body ('' without the header). Batches and online requests derive their ids from it. So a
request with another JSON body never gets the first one's results, even once the first answer is
forgotten: after a temporary error, or after REMEMBER_MS. scope["warmq.remembered"] is True if an
answer may be stored.

JSON bodies are read and compared here. Multipart bodies are not, because clients choose another
boundary for each retry: their handlers call `replayed_response` with the digest of the content.
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

#: Most characters of an Idempotency-Key.
LONGEST_KEY = 255
#: Most bytes of an answer that is stored. If an answer is larger, a retry reaches the handler,
#: which derives the same ids.
LARGEST_ANSWER = 64 * 1024
#: Seconds after which a client may retry again if the first request was still running.
AFTER_S = 1.0
#: Paths of online requests, and the types of their bodies. (Lines of a batch may also name vLLM's
#: aliases.) A retry of an online request waits with the first request for the same answer.
ONLINE_BODY_TYPES = {
    url: body for url, body in BODY_TYPES.items() if url not in ("/score", "/rerank", "/v2/rerank")
}
_STORED_HEADERS = frozenset((b"content-type", b"location"))


def is_temporary(status: int) -> bool:
    """Return whether an answer with this status is not stored; 0 stands for no answer."""
    return status in (0, 408, 409, 429, 499) or status >= 500


class KeyedRequest:
    """One POST with an Idempotency-Key; `owned` is True if its answer is the one to store."""

    def __init__(self, store: IdempotencyStore, name: str, *, online: bool) -> None:
        self._store = store
        self._name = name
        self._token = secrets.token_hex(8)
        self._online = online
        self.owned = False
        #: The claim by which its lease is renewed.
        self.claim = name, self._token

    async def begin(self, content: str) -> Answer | None:
        """Claim the key; return the first request's answer if it is stored.

        `content` is the digest of the content. If it is '' (unknown), call this again with the
        digest. Raises ApiError (409) if an earlier request with this key had other content, or
        still runs; an online request waits with it instead.
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
        """End the request with a status (0: no answer was sent), and store the answer.

        After a temporary error nothing is stored, so that a retry counts as the first request.
        """
        if not self.owned:
            return
        self.owned = False
        try:
            if is_temporary(status):
                await self._store.forget(self._name, self._token)
            else:
                await self._store.finish(self._name, self._token, answer)
        except StoreUnavailable as error:
            log.warning(
                "an answer was not stored for its Idempotency-Key: %s", error.message,
                extra={"action": "idempotency"},
            )  # fmt: skip

    def storing(self, send: Send) -> Send:
        """Return a `send` that stores an answer, if it is short and not streamed."""
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
                    # The answer is stored before the client has all of it: a client may retry then.
                    answer = Answer(status, headers, bytes(body)) if storable else None
                    await self.end(status, answer)
            await send(message)

        return store


def conflict() -> ApiError:
    """Return the error for a key that came with two different requests."""
    return ApiError(
        409, "this Idempotency-Key was used for another request; use a new key for a new "
        "request, and the same body for a retry",
        code="idempotency_conflict", param="Idempotency-Key", retry=False,
    )  # fmt: skip


async def replayed_response(request: Request, digest: str) -> Response | None:
    """Return the first request's answer to a multipart request, or None to go on.

    The handler calls this once, before it creates anything, with a digest of everything that
    decides the result. Raises ApiError (409) like `KeyedRequest.begin`.
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
            if body is None:  # the client has closed the connection
                return
            # The query also decides the result.
            content = _sha256(scope["query_string"] + b"\0" + body)
            scope["warmq.idempotency"] = _sha256(f"{name}\0{content}".encode())
            receive = replaying(body, receive)
            # From here on only the handler keeps the body.
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
            # This call ends a request that got no complete answer. A client that closes its
            # connection cancels its request, and would cancel this call without `shield`.
            await asyncio.shield(keyed.end(0, None))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
