"""Limits connections: slow senders, slow-read clients, huge heads, too many connections.

This extends uvicorn's protocol for httptools. A request costs a few assignments more; once a second
all connections are checked for timeouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.errors import ApiError, error_response, new_request_id, send_error

#: Most bytes of a head, which is a request line with its headers.
HEAD_BYTES = 64 * 1024
#: Seconds within which a head must come: from the start of its connection or its first byte.
HEAD_S = 20.0
#: Most bytes of trailers, and of everything else between two pieces of a body.
FRAMING_BYTES = HEAD_BYTES
#: Bytes that a body must bring within BODY_S seconds while the gateway waits for it.
BODY_BYTES, BODY_S = 1024, 30.0
#: Seconds within which a client must read some of its answer.
SLOW_READ_S = 60.0
#: Most connections; each takes some 10 KB.
MOST = 20_000
#: Number of connections above MOST that are answered 503; further ones are closed immediately.
REFUSED_ABOVE_LIMIT = 1000
#: File descriptors for other uses: Redis, files, uploads.
OTHER_DESCRIPTORS = 256
_IDLE, _HEAD, _BODY = range(3)
_NEVER = float("inf")


def raise_descriptor_limit(connections: int = MOST) -> int:
    """Raise this process's limit of file descriptors; return how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = connections + REFUSED_ABOVE_LIMIT + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return connections
    return max(1, min(connections, soft - REFUSED_ABOVE_LIMIT - OTHER_DESCRIPTORS))


def silence_client_errors() -> None:
    """Keep messages that any client can cause out of uvicorn's log."""
    texts = ("Invalid HTTP request received.", "Unsupported upgrade request.")
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.getMessage() not in texts)


class Guard:
    """Checks all connections once a second, and refuses those above `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._connections: set[Any] | None = None

    def watch(self, connections: set[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Begin to check these connections; later calls do nothing."""
        if self._connections is None:
            self._connections = connections
            loop.call_later(1, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in tuple(self._connections or ()):
            if now >= connection.until:
                connection.on_timeout(now)
        loop.call_later(1, self._check, loop)

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 503: this is the ASGI application of connections above the limit."""
        error = ApiError(
            503, f"this gateway has {self.most} connections, its limit; try again",
            code="too_many_connections", after_s=2, close=True,
        )  # fmt: skip
        scope["warmq.request_id"] = new_request_id()
        await send_error(scope, receive, send, error)


class Connection(HttpToolsProtocol):
    """One client's connection. `until` is the time, on the loop's clock, of its next check."""

    guard: Guard

    def connection_made(self, transport: Any) -> None:
        """Begin a connection."""
        super().connection_made(transport)
        self._real_app, self.url = self.app, b""
        self._phase, self._bytes, self._chunk, self._framing = _HEAD, 0, 0, 0
        self._write_paused_at: float | None = None
        self._body_by = _NEVER
        self._problem = (400, "the request is not HTTP")
        self.until = self.loop.time() + HEAD_S
        self.guard.watch(self.connections, self.loop)
        if len(self.connections) > self.guard.most + REFUSED_ABOVE_LIMIT:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        self._chunk = len(data)
        super().data_received(data)
        self._bytes += self._chunk
        self._framing += self._chunk
        self._chunk = 0
        if self._phase == _HEAD and self._bytes > HEAD_BYTES and not self.transport.is_closing():
            self._note_long_head()
            self.send_400_response("")
        elif self._phase == _BODY and self._framing > FRAMING_BYTES:
            self._end_framing()

    def on_message_begin(self) -> None:
        """Note the beginning of a request's head."""
        super().on_message_begin()
        self._phase, self._bytes = _HEAD, 0
        self.until = self.loop.time() + HEAD_S

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        # `_framing` counts the bytes around a body's pieces. A piece resets it, and the rest of the
        # received data does not count.
        self._framing = -self._chunk
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Start the request, or refuse it."""
        if self._bytes + self._chunk > HEAD_BYTES:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > HEAD_BYTES:
                self._note_long_head()
                raise ValueError("the head is too long")
        too_many = len(self.connections) > self.guard.most
        self.app = self.guard.refuse if too_many else self._real_app
        self._phase, self._bytes, self._framing = _BODY, 0, -self._chunk
        self.until, self._body_by = self.loop.time() + BODY_S, _NEVER
        cast(Scope, self.scope)["warmq.connection"] = self
        super().on_headers_complete()
        # The parser adds trailers to this list; the request has its own list of headers by now.
        self.headers = []

    def has_small_body(self, scope: Scope, most: int, within_s: float) -> bool:
        """Return whether the body of this scope's request has at most `most` bytes.

        The rest of such a body must come within `within_s` seconds.
        """
        if self.scope is not scope:  # the client has sent another request already
            return False
        cycle = self.cycle
        if not cycle.more_body:
            return len(cycle.body) <= most
        headers: dict[bytes, bytes] = cast(Any, scope)["warmq.headers"]
        length = headers.get(b"content-length")
        if length is None or b"transfer-encoding" in headers or int(length) > most:
            return False
        self._body_by = self.loop.time() + within_s
        self.until = min(self.until, self._body_by)
        return True

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        super().on_message_complete()
        self._phase = _IDLE
        self.until = _NEVER if self._write_paused_at is None else self.until

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        super().pause_writing()
        self._write_paused_at = self.loop.time()
        self.until = min(self.until, self._write_paused_at + SLOW_READ_S)

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        self._write_paused_at = None

    def on_timeout(self, now: float) -> None:
        """Close the connection unless there is a reason to wait longer."""
        paused_at = self._write_paused_at
        read_by = _NEVER if paused_at is None else paused_at + SLOW_READ_S
        # Either the gateway makes the client wait, or enough bytes have come.
        in_time = self.flow.read_paused or self._bytes >= BODY_BYTES
        if self.transport.is_closing():
            self.until = now + SLOW_READ_S
            if paused_at is not None:  # the client does not read the last bytes either
                self.transport.abort()
        elif now >= read_by:
            self.transport.abort()
        elif self._phase == _IDLE:
            self.until = read_by
        elif self._phase == _BODY and now < self._body_by and in_time:
            self._bytes, self.until = 0, min(now + BODY_S, self._body_by)
        else:
            self._end_slow(now)

    def _end_slow(self, now: float) -> None:
        cycle = self.cycle
        if self._phase == _HEAD and cycle is not None and not cycle.response_complete:
            self.until = now + HEAD_S  # the request before this one is being answered
        elif not self._bytes if self._phase == _HEAD else cycle.response_started:
            self.transport.close()  # there is nothing to answer, or an answer has begun
        else:
            self._problem = (408, "the request did not come in time")
            self.send_400_response("")

    def _end_framing(self) -> None:
        """End a request whose trailers and chunk extensions exceed FRAMING_BYTES.

        The parser collects them without a bound.
        """
        if self.cycle.response_started:
            self.transport.close()
        elif not self.transport.is_closing():
            self._problem = (431, f"the request's trailers have more than {FRAMING_BYTES} bytes")
            self.send_400_response("")

    def _note_long_head(self) -> None:
        self._problem = (431, f"the request's head has more than {HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed or incomplete request as the API of its path reports errors."""
        status, text = self._problem
        request_id = new_request_id()
        scope = {"path": _path_of(self.url), "warmq.request_id": request_id}
        response = error_response(scope, ApiError(status, text, code="bad_request", close=True))
        response.headers["x-request-id"] = request_id
        phrase = {408: "Request Timeout", 431: "Request Header Fields Too Large"}
        head = b"HTTP/1.1 %d %s\r\n" % (status, phrase.get(status, "Bad Request").encode())
        lines = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
        self.transport.write(head + lines + b"\r\n" + bytes(response.body))
        self.transport.close()


def _path_of(url: bytes) -> str:
    """Return a URL's decoded path; the whole URL if it is malformed."""
    path = url.partition(b"?")[0]
    with contextlib.suppress(httptools.HttpParserError):  # the head may be cut off within the URL
        path = httptools.parse_url(path).path or b""  # also of http://host/path
    return unquote(path.decode("latin-1"))


def protocol_for(most: int) -> type[Connection]:
    """Return the class for uvicorn's option `http`, for at most `most` connections."""
    return type("Connection", (Connection,), {"guard": Guard(most)})
