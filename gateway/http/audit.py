"""One line of JSON on stdout for each write: who, what, how it ended. Never prompts, never keys."""

from __future__ import annotations

import logging
import re
import sys
import time

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.caller import Caller
from gateway.http.idempotency import ATTACHING

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


class Audit:
    """Writes the line of each request that changes something; online requests change nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] not in _WRITES or scope["path"] in ATTACHING:
            await self._app(scope, receive, send)
            return
        began, status, sent, received, head = time.monotonic(), 0, 0, 0, b""

        async def count_in() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def count_out(message: Message) -> None:
            nonlocal status, sent, head
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                body = message.get("body", b"")
                sent += len(body)
                head = head or body[:_LOOKED_AT]
            await send(message)

        try:
            await self._app(scope, count_in, count_out)
        finally:
            seconds = time.monotonic() - began
            log.info("%s", _line(scope, status, received, sent, head, seconds))


def _line(scope: Scope, status: int, received: int, sent: int, head: bytes, seconds: float) -> str:
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
