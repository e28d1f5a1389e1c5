"""Bodies are bounded: each in its size, before anybody is asked who calls; those that are held in
memory while they come in sum and in their time.

Small bodies are not counted in sum: they are served also while large ones hold all of the budget. A
body counts until what it asked for is queued, or its request is over.
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

#: Uploads count what they read against a limit of their own (gateway/files, batches/anthropic).
_UPLOADS = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts|/v1/messages/batches|/ui/submit")
#: A client reads no answer while it is still sending, and loses one if its connection is closed
#: with bytes of it unread. So much of a body that is too large is taken and dropped before the
#: answer, as a multiple of the limit; of a larger one nothing more.
DROPPED = 4


def takes_large(path: str) -> bool:
    """Whether what is posted there is read piece by piece, and may be larger than memory."""
    return _UPLOADS.fullmatch(path) is not None


class BodySizeLimit:
    """Answers 413 to bodies whose heads tell more than `most` bytes, 404 to paths with control
    characters."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if not scope["path"].isprintable():
            told = ApiError(404, "the path has control characters, as no route has")
            await send_error(scope, receive, send, told)
            return
        headers = scope["warmq.headers"]
        length = int(headers.get(b"content-length", 0))
        if length > self._most and not takes_large(scope["path"]):
            close = length > self._most * DROPPED
            if not close and b"expect" not in headers:
                await _drop(receive, length)
            await send_error(scope, receive, send, _too_large(self._most), close=close)
            return
        await self._app(scope, receive, send)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {most} bytes, the most that this gateway takes "
        "(twice WARMQ_MAX_LINE_BYTES, 1 MiB at least); send what is large as a file",
        code="request_too_large",
    )


async def _drop(receive: Receive, most: int) -> None:
    """Take the rest of a body, up to about so many bytes."""
    while most > 0:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body"):
            return
        most -= len(message["body"])


async def whole_body(receive: Receive) -> bytes | None:
    """Return a request's body; None if the client has gone before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` for a body that was read already."""
    kept: bytes | None = body
    del body

    async def replay() -> Message:
        nonlocal kept
        if kept is None:
            return await receive()
        given, kept = kept, None  # who has read it may drop it
        return {"type": "http.request", "body": given, "more_body": False}

    return replay


#: What large bodies may hold together in one process, in bytes; at least two of the largest that
#: are taken. One key may hold half of it.
BUDGET = 256 * 2**20
#: So many bytes of each body are not counted: a chat of 16,000 tokens.
SMALL = 64 * 1024
#: A body that is counted brings so many bytes in so many seconds: 8 KiB/s, half a modem of 128
#: kbit/s. Each body has come whole within `WHOLE_S` of waiting for its client.
PIECE_BYTES, PIECE_S = 128 * 1024, 16.0
WHOLE_S = 300.0
#: After so many bytes were given back, and not more often than so, memory is returned to the
#: system: bodies come in pieces that the C library keeps for itself otherwise.
TRIM_BYTES, TRIM_S = 16 * 2**20, 5.0
#: Of these uploads lines are held, up to the longest one; other uploads are written as they come.
_HOLDS_LINES = "/v1/messages/batches"


class Budget:
    """What bodies hold in this process, in all and by key. For its event loop alone."""

    def __init__(self, most: int = BUDGET) -> None:
        self._most = most
        self.held: Counter[str] = Counter()
        self._returned = 0
        self._trimmed = 0.0
        self._trims: asyncio.TimerHandle | None = None
        self._running: asyncio.Future[None] | None = None

    def take(self, key: str, size: int) -> None:
        """Hold so many bytes more for a key.

        Raises:
            ApiError: 503, the key or all together would hold too much; nothing is held then.
        """
        of_key = self.held[key] + size > self._most // 2
        if of_key or self.held.total() + size > self._most:
            whose = "of this key " if of_key else ""
            most = self._most // 2 if of_key else self._most
            raise ApiError(
                503,
                f"large bodies {whose}that are being read hold {most // 2**20} MiB, the most that "
                "this gateway takes at a time; try again, or send fewer of them at once",
                code="too_many_bodies", after_s=2,
            )  # fmt: skip
        self.held[key] += size

    def give_back(self, key: str, size: int) -> None:
        """Hold so many bytes less."""
        self.held[key] -= size
        if self.held[key] <= 0:
            del self.held[key]
        self._returned += size
        if self._returned >= TRIM_BYTES and self._trims is None:
            after_s = max(0.1, self._trimmed + TRIM_S - time.monotonic())
            self._trims = asyncio.get_running_loop().call_later(after_s, self._trim)

    def _trim(self) -> None:
        self._returned, self._trims, self._trimmed = 0, None, time.monotonic()
        self._running = asyncio.get_running_loop().run_in_executor(None, _return_memory)


def _return_memory() -> None:
    """Give free memory back to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Body:
    """What one body holds; `queued` ends it before its request ends.

    At most `longest_line` of it is held at a time where that is given; else it may have `most`
    bytes.
    """

    def __init__(self, budget: Budget, key: str, longest_line: int | None, most: int) -> None:
        self._budget, self._key, self._longest_line, self._most = budget, key, longest_line, most
        self.come = self._held = 0
        self._waited = self._piece_waited = 0.0
        self._piece = 0
        self.more = True

    @property
    def too_large(self) -> bool:
        """Whether more has come than may."""
        return self._longest_line is None and self.come > self._most

    def patience(self) -> float:
        """Return how many seconds the next bytes may take."""
        left = PIECE_S - self._piece_waited if self.come > SMALL else WHOLE_S
        whole = self._longest_line is None
        return max(0.0, min(left, WHOLE_S - self._waited) if whole else left)

    def took(self, message: Message, waited_s: float) -> None:
        """Count a message, which was waited for so long."""
        size = len(message.get("body", b""))
        self.more = bool(message.get("more_body", False))
        self.come += size
        if self.too_large:  # whoever reads raises it; it becomes the answer
            raise _too_large(self._most)
        self._piece += size
        self._waited += waited_s
        self._piece_waited += waited_s
        if self._piece >= PIECE_BYTES:
            self._piece, self._piece_waited = 0, 0.0
        counted = max(0, self.come - SMALL)
        if self._longest_line is not None:
            counted = min(counted, self._longest_line)
        if counted > self._held:
            self._budget.take(self._key, counted - self._held)
            self._held = counted

    def queued(self) -> None:
        """Hold nothing any more; also if it held nothing."""
        held, self._held = self._held, 0
        if held:
            self._budget.give_back(self._key, held)


class BodyMemoryLimit:
    """Counts the bodies that are read in it; scope["warmq.body"] is the `Body` of what is counted.

    A small body is not counted, and its connection has the time by which it must have come.
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
        lines = scope["path"] == _HOLDS_LINES
        if (
            scope["method"] in ("GET", "HEAD")
            or (connection is not None and connection.has_small_body(scope, self._small, WHOLE_S))
            or (takes_large(scope["path"]) and not lines)
        ):
            await self._app(scope, receive, send)
            return
        caller: Caller = scope["warmq.caller"]
        key = caller.key_id or caller.tenant
        body = Body(self._budget, key, self._longest_line if lines else None, self._most)
        scope["warmq.body"] = body
        late = False

        async def counted() -> Message:
            nonlocal late
            if not body.more:
                return await receive()  # its client hangs up: that has no time
            began = time.monotonic()
            try:
                async with asyncio.timeout(body.patience()):
                    message = await receive()
            except TimeoutError:
                late = True
                raise _too_slow() from None
            body.took(message, time.monotonic() - began)
            return message

        async def answering(message: Message) -> None:
            if (late or body.too_large) and message["type"] == "http.response.start":
                if body.too_large and body.more:
                    await _drop(receive, self._most * DROPPED - body.come)
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            await self._app(scope, counted, answering)
        finally:
            body.queued()


def _too_slow() -> ApiError:
    return ApiError(
        408,
        f"the body did not come in time: {PIECE_BYTES // 1024} KiB in {PIECE_S:g} s, and all of it "
        f"in {WHOLE_S:g} s, are the least; send what is large as a file",
        code="bad_request",
    )
