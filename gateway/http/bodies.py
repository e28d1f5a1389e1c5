"""Limits bodies: the size of each one, and the memory of all large ones.

The size is checked before the caller is known. A large body is counted until its request is queued
or has ended. Small bodies are not counted, so they are served while large ones use up the budget.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import time
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.caller import Caller
from gateway.http.errors import ApiError, send_error

#: Paths of uploads, which limit the bytes that they read (gateway/files, batches/anthropic).
_UPLOADS = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts|/v1/messages/batches|/ui/submit")
#: The path of an upload that keeps one line at a time in memory.
_KEEPS_LINES = "/v1/messages/batches"
#: Largest body, as a multiple of the limit, that is read to its end before it is refused. A client
#: reads no answer while it is sending, and loses an answer if its connection is closed with unread
#: bytes.
DISCARDED = 4
#: Most bytes that the large bodies of one process may take, unless two of the largest size need
#: more. One key may take half.
BUDGET = 256 * 2**20
#: Bytes of each body that are not counted: a chat of 16,000 tokens.
SMALL = 64 * 1024
#: Bytes that a large body must bring within PIECE_S seconds: 8 KiB/s, half the rate of a modem
#: with 128 kbit/s.
PIECE_BYTES, PIECE_S = 128 * 1024, 16.0
#: Most seconds, in total, for which the gateway waits for the client while it reads a body.
WHOLE_S = 300.0
#: Freed bytes after which memory is returned to the system, and least seconds between two returns.
#: The C library would keep the memory of freed bodies for itself.
TRIM_BYTES, TRIM_S = 16 * 2**20, 5.0


def takes_large(path: str) -> bool:
    """Return whether bodies of this path are read in pieces, and may exceed memory."""
    return _UPLOADS.fullmatch(path) is not None


class BodySizeLimit:
    """Answers 413 to a Content-Length above `most` bytes, 404 to paths with control characters."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if not scope["path"].isprintable():
            error = ApiError(404, "the path has control characters; remove them")
            await send_error(scope, receive, send, error)
            return
        headers = scope["warmq.headers"]
        length = int(headers.get(b"content-length", 0))
        if length > self._most and not takes_large(scope["path"]):
            close = length > self._most * DISCARDED
            if not close and b"expect" not in headers:
                await _discard(receive, length)
            await send_error(scope, receive, send, _too_large(self._most, close=close))
            return
        await self._app(scope, receive, send)


def _too_large(most: int, *, close: bool = False) -> ApiError:
    message = (
        f"the body has more than {most} bytes, the limit of this gateway (twice "
        "WARMQ_MAX_LINE_BYTES, at least 1 MiB); upload large content as a file"
    )
    return ApiError(413, message, code="request_too_large", close=close)


async def _discard(receive: Receive, most: int) -> None:
    """Read the rest of a body, up to about `most` bytes."""
    while most > 0:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body"):
            return
        most -= len(message["body"])


async def whole_body(receive: Receive) -> bytes | None:
    """Return a request's body; None if the client closed the connection before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns a body that was read before, and keeps no copy."""
    kept: bytes | None = body
    del body

    async def replay() -> Message:
        nonlocal kept
        if kept is None:
            return await receive()
        whole, kept = kept, None
        return {"type": "http.request", "body": whole, "more_body": False}

    return replay


class Budget:
    """Counts the bytes of bodies in this process, in total and by key. Not thread-safe."""

    def __init__(self, most: int = BUDGET) -> None:
        self._most = most
        self.used: Counter[str] = Counter()
        self._freed = 0
        self._trimmed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._trimming: asyncio.Future[None] | None = None

    def take(self, key: str, size: int) -> None:
        """Add `size` bytes; raise ApiError (503) and add nothing if they exceed the budget."""
        key_exceeds = self.used[key] + size > self._most // 2
        if key_exceeds or self.used.total() + size > self._most:
            owner = "of this key" if key_exceeds else "of all keys"
            most = self._most // 2 if key_exceeds else self._most
            raise ApiError(
                503,
                f"large bodies {owner} that are being read take {most // 2**20} MiB, the limit of "
                "this gateway; try again, or send fewer of them at a time",
                code="too_many_bodies", after_s=2,
            )  # fmt: skip
        self.used[key] += size

    def give_back(self, key: str, size: int) -> None:
        """Subtract `size` bytes."""
        self.used[key] -= size
        if self.used[key] <= 0:
            del self.used[key]
        self._freed += size
        if self._freed >= TRIM_BYTES and self._timer is None:
            after_s = max(0.1, self._trimmed_at + TRIM_S - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(after_s, self._trim)

    def _trim(self) -> None:
        self._freed, self._timer, self._trimmed_at = 0, None, time.monotonic()
        self._trimming = asyncio.get_running_loop().run_in_executor(None, _return_memory)


def _return_memory() -> None:
    """Return free memory to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Body:
    """The counted bytes of one body, until `stop_counting` is called or its request ends.

    If `longest_line` is set, at most so many bytes of the body are in memory at a time. Otherwise
    the whole body is in memory, and may have `most` bytes.
    """

    def __init__(self, budget: Budget, key: str, longest_line: int | None, most: int) -> None:
        self._budget, self._key, self._longest_line, self._most = budget, key, longest_line, most
        self.received = self._counted = 0
        self._waited = self._piece_waited = 0.0
        self._piece = 0
        self.more = True

    @property
    def too_large(self) -> bool:
        """Whether more bytes than allowed were received."""
        return self._longest_line is None and self.received > self._most

    def timeout(self) -> float:
        """Return the seconds within which the next bytes must come."""
        left = PIECE_S - self._piece_waited if self.received > SMALL else WHOLE_S
        if self._longest_line is None:
            left = min(left, WHOLE_S - self._waited)
        return max(0.0, left)

    def count(self, message: Message, waited_s: float) -> None:
        """Count a message that came after `waited_s` seconds; raise ApiError above a limit."""
        size = len(message.get("body", b""))
        self.more = bool(message.get("more_body", False))
        self.received += size
        if self.too_large:
            raise _too_large(self._most)
        self._piece += size
        self._waited += waited_s
        self._piece_waited += waited_s
        if self._piece >= PIECE_BYTES:
            self._piece, self._piece_waited = 0, 0.0
        counted = max(0, self.received - SMALL)
        if self._longest_line is not None:
            counted = min(counted, self._longest_line)
        if counted > self._counted:
            self._budget.take(self._key, counted - self._counted)
            self._counted = counted

    def stop_counting(self) -> None:
        """Stop counting this body."""
        counted, self._counted = self._counted, 0
        if counted:
            self._budget.give_back(self._key, counted)


class BodyMemoryLimit:
    """Counts each large body that is read into memory, as a `Body` in scope["warmq.body"].

    A small body is not counted; its Connection limits the time in which it must come.
    """

    def __init__(self, app: ASGIApp, most: int, longest_line: int) -> None:
        self._app = app
        self._most = most
        self._budget = Budget(max(BUDGET, 2 * most))
        self._longest_line = longest_line
        self._small = min(SMALL, most)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        connection = scope.get("warmq.connection")
        upload, lines = takes_large(scope["path"]), scope["path"] == _KEEPS_LINES
        # has_small_body() sets a deadline of WHOLE_S, which uploads do not have.
        if (
            scope["method"] in ("GET", "HEAD")
            or (upload and not lines)
            or (
                not upload
                and connection is not None
                and connection.has_small_body(scope, self._small, WHOLE_S)
            )
        ):
            await self._app(scope, receive, send)
            return
        caller: Caller = scope["warmq.caller"]
        body = Body(self._budget, caller.owner, self._longest_line if lines else None, self._most)
        scope["warmq.body"] = body
        late = False

        async def counted() -> Message:
            nonlocal late
            if not body.more:
                return await receive()  # waits for the client to close the connection
            began = time.monotonic()
            try:
                async with asyncio.timeout(body.timeout()):
                    message = await receive()
            except TimeoutError:
                late = True
                raise _too_slow() from None
            body.count(message, time.monotonic() - began)
            return message

        async def answering(message: Message) -> None:
            if (late or body.too_large) and message["type"] == "http.response.start":
                if body.too_large and body.more:
                    await _discard(receive, self._most * DISCARDED - body.received)
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            await self._app(scope, counted, answering)
        finally:
            body.stop_counting()


def _too_slow() -> ApiError:
    message = (
        f"the body came too slowly: at least {PIECE_BYTES // 1024} KiB must come in {PIECE_S:g} s, "
        f"and all of it in {WHOLE_S:g} s; upload large content as a file"
    )
    return ApiError(408, message, code="bad_request")
