"""Bodies that are held in memory while they come have a budget in sum, and a time.

Small bodies are not counted: they are served also while large ones hold all of the budget. A body
counts until what it asked for is queued, or its request is over.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.bodies import takes_large
from gateway.http.caller import Caller
from gateway.http.errors import ApiError

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
    """What one body holds; `queued` ends it before its request ends."""

    def __init__(self, budget: Budget, key: str, most: int | None) -> None:
        self._budget, self._key, self._most = budget, key, most
        self._come = self._held = 0
        self._waited = self._piece_waited = 0.0
        self._piece = 0
        self.more = True

    def patience(self) -> float:
        """Return how many seconds the next bytes may take."""
        left = PIECE_S - self._piece_waited if self._come > SMALL else WHOLE_S
        return max(0.0, left if self._most is not None else min(left, WHOLE_S - self._waited))

    def took(self, message: Message, waited_s: float) -> None:
        """Count a message, which was waited for so long."""
        size = len(message.get("body", b""))
        self.more = bool(message.get("more_body", False))
        self._come += size
        self._piece += size
        self._waited += waited_s
        self._piece_waited += waited_s
        if self._piece >= PIECE_BYTES:
            self._piece, self._piece_waited = 0, 0.0
        counted = max(0, self._come - SMALL)
        counted = counted if self._most is None else min(counted, self._most)
        if counted > self._held:
            self._budget.take(self._key, counted - self._held)
            self._held = counted

    def queued(self) -> None:
        """Hold nothing any more; also if it held nothing."""
        held, self._held = self._held, 0
        if held:
            self._budget.give_back(self._key, held)


class Reading:
    """Counts the bodies that are read in it; scope["warmq.body"] is the `Body` of what is counted.

    A small body that has come whole with its head is not counted, nor waited for.
    """

    def __init__(self, app: ASGIApp, most: int, longest_line: int) -> None:
        self._app = app
        self._budget = Budget(max(BUDGET, 2 * most))
        self._longest_line = longest_line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        connection = scope.get("warmq.connection")
        if connection is not None and connection.has_come_whole(scope, SMALL):
            await self._app(scope, receive, send)
            return
        lines = scope["path"] == _HOLDS_LINES
        if takes_large(scope["path"]) and not lines:
            await self._app(scope, receive, send)
            return
        caller: Caller = scope["warmq.caller"]
        key = caller.key_id or caller.tenant
        body = Body(self._budget, key, self._longest_line if lines else None)
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
            if late and message["type"] == "http.response.start":
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
