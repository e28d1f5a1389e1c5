"""Calls that write, all but online requests: a line of JSON on stdout for each, and their rate."""

from __future__ import annotations

import logging
import re
import sys
import time

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.errors import StoreUnavailable
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, api_error, send_error
from gateway.http.idempotency import ONLINE_PATHS
from gateway.http.limits import Limits

log = logging.getLogger(__name__)

_WRITES = frozenset(("POST", "DELETE", "PUT", "PATCH"))
#: Where a path names an object, and where an answer does.
_IN_PATH = re.compile(r"/v1/(?:files|uploads|batches|messages/batches)/([\w.-]{1,128})")
_IN_ANSWER = re.compile(rb'"id":\s?"([\w.-]{1,128})"')
#: An object's id stands at the beginning of its JSON.
_LOOKED_AT = 512


def to_stdout() -> None:
    """Send the lines to stdout, where nothing else is; the log goes to stderr."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


class WriteAudit:
    """Takes each call that writes of its key's rate, and writes its line; online requests change
    nothing, and have rates of their own.

    What is refused under an Idempotency-Key is remembered, so a key's refusals have a rate, too.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["method"] not in _WRITES:
            await self._app(scope, receive, send)
        elif scope["path"] not in ONLINE_PATHS:
            await self._told(scope, receive, send)
        elif b"idempotency-key" in scope["warmq.headers"] and scope["method"] == "POST":
            await self._rated(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _told(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, sent, received, head = time.monotonic(), 0, 0, b""

        async def count_in() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def count_out(message: Message) -> None:
            nonlocal sent, head
            body = message.get("body", b"")
            sent += len(body)
            head = head or body[:_LOOKED_AT]
            await send(message)

        try:
            await self._rated(scope, count_in, count_out)
        finally:
            seconds = time.monotonic() - began
            log.info("%s", _line(scope, received, sent, head, seconds))

    async def _rated(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope["warmq.caller"]
        keyed = scope["method"] == "POST" and b"idempotency-key" in scope["warmq.headers"]
        if caller.key_id or not scope["path"].startswith("/ui"):  # else it may be a login
            try:
                if scope["path"] not in ONLINE_PATHS:
                    await self._limits.check_write(caller)
                if keyed:
                    await self._limits.check_refusals(caller)
            except (ApiError, StoreUnavailable) as error:
                await send_error(scope, receive, send, api_error(error))
                return
            send = self._watched(caller, scope, send) if keyed else send
        await self._app(scope, receive, send)

    def _watched(self, caller: Caller, scope: Scope, send: Send) -> Send:
        """Return a `send` that counts an answer which is a refusal."""

        async def sent(message: Message) -> None:
            stored = message["type"] == "http.response.start" and scope.get("warmq.remembered")
            # 429 and 5xx are not (idempotency.py).
            if stored and 400 <= message["status"] < 500 and message["status"] != 429:
                self._limits.note_refusal(caller)
            await send(message)

        return sent


def _line(scope: Scope, received: int, sent: int, head: bytes, seconds: float) -> str:
    status = scope.get("warmq.status", 0)
    caller: Caller = scope["warmq.caller"]
    route = scope.get("route")
    found = _IN_PATH.match(scope["path"])
    made = _IN_ANSWER.search(head) if 200 <= status < 300 else None
    line = {
        "event": "write",
        "time": round(time.time(), 3),
        "request_id": scope["warmq.request_id"],
        "tenant": caller.tenant,
        "key_id": caller.key_id or None,
        "method": scope["method"],
        # Only what a route says: a path that none has may be anything.
        "route": getattr(route, "path", None),
        "object_id": found[1] if found else made[1].decode() if made else None,
        "status": status,  # 0: the client went before there was an answer
        "bytes_in": received,
        "bytes_out": sent,
        "ms": round(seconds * 1000),
    }
    return orjson.dumps(line).decode()
