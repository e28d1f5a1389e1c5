"""Logs each write as a JSON line on stdout, and limits the rate of writes.

A write is a POST, PUT, PATCH or DELETE that is not an online request, or creates a background
response. scope["warmq.written"] then has the bytes of the request's body, and the answer's body.
"""

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
from gateway.http.idempotency import ONLINE_BODY_TYPES, is_temporary
from gateway.http.limits import Limits

log = logging.getLogger(__name__)

_METHODS = frozenset(("POST", "DELETE", "PUT", "PATCH"))
#: Matches an object's id in a path; _ID_IN_ANSWER finds one in an answer's first bytes.
ID_IN_PATH = re.compile(r"/v1/(?:files|uploads|batches|messages/batches|responses)/([\w.-]{1,128})")
_ID_IN_ANSWER = re.compile(rb'"id":\s?"([\w.-]{1,128})"')
_ANSWER_HEAD = 512


def to_stdout() -> None:
    """Make the lines go to stdout, which has nothing else; the log goes to stderr."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


class WriteAudit:
    """Counts each write against its key's rate, and logs it; online requests have other rates.

    Refusals of calls with an Idempotency-Key are stored, so their rate is limited, too.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        online = scope["path"] in ONLINE_BODY_TYPES
        idempotent = scope["method"] == "POST" and b"idempotency-key" in scope["warmq.headers"]
        if scope["method"] not in _METHODS:
            await self._app(scope, receive, send)
        elif online:
            await self._online(scope, receive, send, idempotent)
        else:
            await self._logged(scope, receive, send, idempotent)

    async def _online(self, scope: Scope, receive: Receive, send: Send, idempotent: bool) -> None:
        began = time.monotonic()
        try:
            if idempotent:
                await self._limited(scope, receive, send, online=True, idempotent=True)
            else:
                await self._app(scope, receive, send)
        finally:
            if written := scope.get("warmq.written"):
                size, body = written
                seconds = time.monotonic() - began
                log.info("%s", _audit_line(scope, size, len(body), body[:_ANSWER_HEAD], seconds))

    async def _logged(self, scope: Scope, receive: Receive, send: Send, idempotent: bool) -> None:
        began, sent, received, head = time.monotonic(), 0, 0, b""

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            nonlocal sent, head
            body = message.get("body", b"")
            sent += len(body)
            head = head or body[:_ANSWER_HEAD]
            await send(message)

        try:
            await self._limited(
                scope, counted_receive, counted_send, online=False, idempotent=idempotent
            )
        finally:
            seconds = time.monotonic() - began
            log.info("%s", _audit_line(scope, received, sent, head, seconds))

    async def _limited(
        self, scope: Scope, receive: Receive, send: Send, *, online: bool, idempotent: bool
    ) -> None:
        caller: Caller = scope["warmq.caller"]
        if not caller.key_id and scope["path"].startswith("/ui"):  # a login has no key yet
            await self._app(scope, receive, send)
            return

        async def refusals_counted(message: Message) -> None:
            stored = message["type"] == "http.response.start" and scope.get("warmq.remembered")
            if stored and message["status"] >= 400 and not is_temporary(message["status"]):
                self._limits.note_refusal(caller)
            await send(message)

        try:
            if not online:
                await self._limits.check_write(caller)
            if idempotent:
                await self._limits.check_refusals(caller)
        except (ApiError, StoreUnavailable) as error:
            await send_error(scope, receive, send, api_error(error))
            return
        await self._app(scope, receive, refusals_counted if idempotent else send)


def _audit_line(scope: Scope, received: int, sent: int, head: bytes, seconds: float) -> str:
    status = scope.get("warmq.status", 0)
    caller: Caller = scope["warmq.caller"]
    in_path = ID_IN_PATH.match(scope["path"])
    in_answer = _ID_IN_ANSWER.search(head) if 200 <= status < 300 else None
    line = {
        "event": "write",
        "time": round(time.time(), 3),
        "request_id": scope["warmq.request_id"],
        "tenant": caller.tenant,
        "key_id": caller.key_id or None,
        "method": scope["method"],
        # The route is logged, not the path: a path without a route may contain anything.
        "route": getattr(scope.get("route"), "path", None),
        "object_id": in_path[1] if in_path else in_answer[1].decode() if in_answer else None,
        # 0: the client closed the connection before there was an answer.
        "status": status,
        "bytes_in": received,
        "bytes_out": sent,
        "ms": round(seconds * 1000),
    }
    return orjson.dumps(line).decode()
