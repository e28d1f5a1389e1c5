"""Connections that nobody can hold for ever: slow, silent and deaf clients, huge heads, too many.

uvicorn's own protocol for httptools, with bounds that it has none of. They cost a request a few
assignments: one look a second over all connections finds those whose time is over.
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

#: A request line and its headers: bytes, and seconds from the first byte (or the connection).
HEAD_BYTES = 64 * 1024
HEAD_S = 20.0
#: Trailers and what else comes between two pieces of a body, in bytes.
FRAMING_BYTES = HEAD_BYTES
#: A body that the gateway is waiting for brings so many bytes in so many seconds.
BODY_BYTES, BODY_S = 1024, 30.0
#: A client that is sent something takes some of it within so many seconds.
SLOW_READ_S = 60.0
#: Most connections at a time; each takes some 10 KB.
MOST = 20_000
#: Connections above the limit are told so, so many; more are closed as they come.
REFUSED_ABOVE_LIMIT = 1000
#: Descriptors that are not clients' connections: Redis, files, uploads.
OTHER_DESCRIPTORS = 256
_IDLE, _HEAD, _BODY = range(3)


def raise_descriptor_limit(wanted: int = MOST) -> int:
    """Allow this process as many descriptors as it may have; return how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + REFUSED_ABOVE_LIMIT + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fit = (
        wanted if soft == resource.RLIM_INFINITY else soft - REFUSED_ABOVE_LIMIT - OTHER_DESCRIPTORS
    )
    return max(1, min(wanted, fit))


def silence_client_errors() -> None:
    """Keep what any client can cause out of uvicorn's log."""
    told = ("Invalid HTTP request received.", "Unsupported upgrade request.")
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.getMessage() not in told)


class Guard:
    """Looks at all connections once a second, and says no above `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._connections: set[Any] | None = None

    def watch(self, connections: set[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look at them, once."""
        if self._connections is None:
            self._connections = connections
            loop.call_later(1, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in tuple(self._connections or ()):
            if now >= connection.until:
                connection.time_is_over(now)
        loop.call_later(1, self._look, loop)

    async def full(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 503: an ASGI application for what is above the limit."""
        told = ApiError(
            503, f"this gateway has {self.most} connections, the most that it takes; try again",
            code="too_many_connections", after_s=2,
        )  # fmt: skip
        scope["warmq.request_id"] = new_request_id()
        await send_error(scope, receive, send, told, close=True)


class Connection(HttpToolsProtocol):
    """One client's connection. `until` is on the loop's clock: when to look at it."""

    guard: Guard

    def connection_made(self, transport: Any) -> None:
        """Take a connection."""
        super().connection_made(transport)
        self._served_by, self.url = self.app, b""
        self._phase, self._bytes, self._chunk, self._framing = _HEAD, 0, 0, 0
        self._write_paused_at: float | None = None
        self._body_by = float("inf")
        self._wrong = (400, "the request is not HTTP")
        self.until = self.loop.time() + HEAD_S
        self.guard.watch(self.connections, self.loop)
        if len(self.connections) > self.guard.most + REFUSED_ABOVE_LIMIT:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        self._chunk = len(data)
        super().data_received(data)
        self._bytes += self._chunk
        self._framing += self._chunk
        self._chunk = 0
        if self._phase == _HEAD and self._bytes > HEAD_BYTES and not self.transport.is_closing():
            self._too_long()
            self.send_400_response("")
        elif self._phase == _BODY and self._framing > FRAMING_BYTES:
            self._end_framing()

    def on_message_begin(self) -> None:
        """Note when a head begins."""
        super().on_message_begin()
        self._phase, self._bytes = _HEAD, 0
        self.until = self.loop.time() + HEAD_S

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._framing = -self._chunk  # the rest of what has just come counts as nothing
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Start the request, or what tells that there are too many."""
        if self._bytes + self._chunk > HEAD_BYTES:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > HEAD_BYTES:
                self._too_long()
                raise ValueError("the head is too long")
        full = len(self.connections) > self.guard.most
        self.app = self.guard.full if full else self._served_by
        self._phase, self._bytes, self._framing = _BODY, 0, -self._chunk
        self.until, self._body_by = self.loop.time() + BODY_S, float("inf")
        cast(Scope, self.scope)["warmq.connection"] = self
        super().on_headers_complete()
        self.headers = []  # trailers come here: everybody has looked at the headers by then

    def has_small_body(self, scope: Scope, most: int, within_s: float) -> bool:
        """Return whether the body of this scope's request has at most `most` bytes.

        What has not come of such a body must come within `within_s` seconds.
        """
        if self.scope is not scope:  # another request came behind it
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
        """Note that a request has come whole."""
        super().on_message_complete()
        self._phase = _IDLE
        self.until = float("inf") if self._write_paused_at is None else self.until

    def pause_writing(self) -> None:
        """Note that a client does not take what it is sent."""
        super().pause_writing()
        self._write_paused_at = self.loop.time()
        self.until = min(self.until, self._write_paused_at + SLOW_READ_S)

    def resume_writing(self) -> None:
        """Note that it does."""
        super().resume_writing()
        self._write_paused_at = None

    def time_is_over(self, now: float) -> None:
        """Close the connection unless there is a reason to wait longer."""
        if self.transport.is_closing():
            self.until = now + SLOW_READ_S
            if self._write_paused_at is not None:  # it does not take the last bytes either
                self.transport.abort()
        elif self._write_paused_at is not None and now >= self._write_paused_at + SLOW_READ_S:
            self.transport.abort()
        elif self._phase == _IDLE:
            self.until = (
                float("inf")
                if self._write_paused_at is None
                else self._write_paused_at + SLOW_READ_S
            )
        elif (
            self._phase == _BODY
            and now < self._body_by
            and (self.flow.read_paused or self._bytes >= BODY_BYTES)
        ):  # the gateway lets the client wait, or all is well
            self._bytes, self.until = 0, min(now + BODY_S, self._body_by)
        else:
            self._too_slow(now)

    def _too_slow(self, now: float) -> None:
        cycle = self.cycle
        if self._phase == _HEAD and cycle is not None and not cycle.response_complete:
            self.until = now + HEAD_S  # the request before this one is being answered
        elif not self._bytes if self._phase == _HEAD else cycle.response_started:
            self.transport.close()  # there is nothing to answer, or it was answered
        else:
            self._wrong = (408, "the request did not come in time")
            self.send_400_response("")

    def _end_framing(self) -> None:
        """End a request whose chunks have more beside their bytes than any client's: trailers and
        extensions, which the parser gathers, without a bound of its own."""
        if self.cycle.response_started:
            self.transport.close()
        elif not self.transport.is_closing():
            self._wrong = (431, f"the request's trailers have more than {FRAMING_BYTES} bytes")
            self.send_400_response("")

    def _too_long(self) -> None:
        self._wrong = (431, f"the request's head has more than {HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, or no whole one, in the envelope of its path."""
        status, text = self._wrong
        request_id = new_request_id()
        scope = {"path": _path_of(self.url), "warmq.request_id": request_id}
        told = error_response(scope, ApiError(status, text, code="bad_request"))
        told.headers.update({"connection": "close", "x-request-id": request_id})
        phrase = {408: "Request Timeout", 431: "Request Header Fields Too Large"}
        head = b"HTTP/1.1 %d %s\r\n" % (status, phrase.get(status, "Bad Request").encode())
        lines = b"".join(b"%s: %s\r\n" % pair for pair in told.raw_headers)
        self.transport.write(head + lines + b"\r\n" + bytes(told.body))
        self.transport.close()


def _path_of(url: bytes) -> str:
    """Return the path of a request line as routes see it; what has come of it, if it is no URL."""
    path = url.partition(b"?")[0]
    with contextlib.suppress(httptools.HttpParserError):  # the head may be cut off within it
        path = httptools.parse_url(path).path or b""  # also of http://host/path
    return unquote(path.decode("latin-1"))


def protocol_for(most: int) -> type[Connection]:
    """Return uvicorn's `http` for at most so many connections."""
    return type("Connection", (Connection,), {"guard": Guard(most)})
