"""A server with OpenAI's API, and a session like aiohttp's to it, without sockets.

What it answers is a function of the request and of the time, which a test sets.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import orjson

Json = dict[str, Any]
MODEL = "stub"
#: How often a server that works on an answer lets the client know.
STEP_S = 240.0
NGINX = (
    b"<html>\r\n<head><title>%s</title></head>\r\n<body>\r\n<center><h1>%s</h1></center>\r\n"
    b"<hr><center>nginx</center>\r\n</body>\r\n</html>\r\n"
)


@dataclass(frozen=True)
class Reply:
    """An answer: `pieces` are (seconds before it, bytes); None for bytes cuts the connection."""

    status: int = 200
    pieces: tuple[tuple[float, bytes | None], ...] = ()
    headers: dict[str, str] = field(default_factory=dict)


def page(status: int, body: bytes | Json, **headers: str) -> Reply:
    """Return an answer that comes at once."""
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return Reply(status, ((0.0, raw),), headers)


def nginx(status: int, words: str) -> Reply:
    """Return nginx's page of an error."""
    title = f"{status} {words}".encode()
    return page(status, NGINX % (title, title), **{"Content-Type": "text/html"})


def answer(body: Json, seconds: float = 0.2) -> Reply:
    """Return a chat's or completion's answer as this body asks for it, after some seconds."""
    chat = "messages" in body
    text = {"message" if chat else "text": {"role": "assistant", "content": "4"} if chat else "4"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    frame = {"id": "x", "created": 1, "model": MODEL}
    if not body.get("stream"):
        kind = "chat.completion" if chat else "text_completion"
        choice = {"index": 0, "finish_reason": "stop", **text}
        whole = {**frame, "object": kind, "choices": [choice], "usage": usage}
        return Reply(200, ((seconds, orjson.dumps(whole)),))
    part = {"delta": {"role": "assistant", "content": "4"}} if chat else {"text": "4"}
    chunk = {**frame, "object": "chat.completion.chunk" if chat else "text_completion"}
    events = (
        {**chunk, "choices": [{"index": 0, "finish_reason": "stop", **part}]},
        {**chunk, "choices": [], "usage": usage},
    )
    raw = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)
    alive = ((STEP_S, b": still at it\n\n"),) * int(seconds / STEP_S)
    return Reply(200, (*alive, (seconds % STEP_S, raw + b"data: [DONE]\n\n")))


class SimulatedServer:
    """`post` answers requests; `paths` are the GETs that it has, by their whole URL's path."""

    def __init__(self, owner: str = "someone", seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.posts: list[tuple[float, str, str]] = []
        self.gets: list[tuple[float, str]] = []
        self.post: Callable[[str, Json], Reply] = lambda _, body: answer(body)
        listed = {"data": [{"id": MODEL, "owned_by": owner}]}
        self.paths: dict[str, Callable[[], Reply]] = {"/v1/models": lambda: page(200, listed)}
        if owner == "vllm":
            self.paths["/health"] = lambda: page(200, b"")

    def respond(self, method: str, path: str, body: Json, request_id: str) -> Reply:
        """Return what comes of a request, and note that it came."""
        if method == "GET":
            self.gets.append((time.monotonic(), path))
            return self.paths.get(path, lambda: page(404, b"404 page not found"))()
        self.posts.append((time.monotonic(), path, request_id))
        return self.post(path, body)

    def session(self, **_: Any) -> Session:
        """Take the place of aiohttp.ClientSession."""
        return Session(self)


class Session:
    """As much of aiohttp's session as the engine uses; every host is the one server."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server

    def get(self, url: str, **_: Any) -> _Call:
        """Ask for a page."""
        return _Call(self._server, "GET", url, b"", "")

    def post(self, url: str, data: bytes, headers: dict[str, str], **_: Any) -> _Call:
        """Send a request."""
        return _Call(self._server, "POST", url, data, headers.get("X-Request-Id", ""))

    async def close(self) -> None:
        """There is nothing to close."""


class _Call:
    """One request, and its response: both are read from here."""

    def __init__(
        self, server: SimulatedServer, method: str, url: str, data: bytes, request_id: str
    ) -> None:
        self._server, self._method, self._id = server, method, request_id
        self._path = "/" + url.split("/", 3)[3]
        self._data = data
        self._reply, self._at = Reply(), 0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.content = self

    async def __aenter__(self) -> Self:
        await asyncio.sleep(0)
        body = orjson.loads(self._data) if self._data else {}
        self._reply = self._server.respond(self._method, self._path, body, self._id)
        self.status, self.headers = self._reply.status, self._reply.headers
        return self

    async def __aexit__(self, *_: object) -> None:
        """The connection goes back."""

    async def readany(self) -> bytes:
        """Return the next piece when its time has come; nothing at the end."""
        if self._at == len(self._reply.pieces):
            return b""
        seconds, piece = self._reply.pieces[self._at]
        self._at += 1
        if seconds:
            await asyncio.sleep(seconds)
        if piece is None:
            raise aiohttp.ClientPayloadError("the connection was cut")
        return piece or await self.readany()

    def at_eof(self) -> bool:
        """Whether all of it was read."""
        return self._at == len(self._reply.pieces)

    async def read(self) -> bytes:
        """Return all of it."""
        pieces = []
        while piece := await self.readany():
            pieces.append(piece)
        return b"".join(pieces)
