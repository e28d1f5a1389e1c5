"""Every answer that a test's HTTP client reads, held against OpenAI's schema of its route, and
against the gateway's own description.

It listens below the clients (the SDKs, httpx), which are as their users have them: bytes are looked
at as they pass. A stream that its reader leaves early is judged by its whole events.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import httpx2
from kit.gateways.answer_schemas import EVENTS, JSON, faults_in
from kit.gateways.own_description import faults_by_description

#: What was wrong, since somebody looked last; and how many answers were judged, by route.
faults: list[str] = []
judged: Counter[str] = Counter()


def judge(method: str, path: str, status: int, kind: str, body: bytes) -> None:
    """Hold one whole answer against its schema."""
    route = f"{method} {path} {status}"
    judged[f"{method} {'/'.join(path.split('/')[:4])}"] += 1
    try:
        found = faults_in(method, path, status, kind, body)
        found += faults_by_description(method, path, status, kind, body)
    except ValueError as error:
        found = [f"not JSON: {error}"]
    faults.extend(f"{route}: {fault}" for fault in found)


class _Passing:
    """The bytes of one answer."""

    def __init__(self, request: Any, response: Any) -> None:
        self._to = (request.method, request.url.path, response.status_code)
        self._kind: str = response.headers.get("content-type", "")
        self._looked_at = request.method != "HEAD" and (
            response.status_code >= 400 or self._kind.startswith((JSON, EVENTS))
        )
        self._pieces: list[bytes] = []
        self._done = False

    def see(self, piece: bytes) -> None:
        if self._looked_at:
            self._pieces.append(piece)

    def end(self, *, whole: bool) -> None:
        if self._done or not self._looked_at:
            return
        self._done = True
        if whole or self._kind.startswith(EVENTS):
            judge(*self._to, self._kind, b"".join(self._pieces))


def _sync_stream(library: Any) -> Any:
    class Stream(library.SyncByteStream):  # type: ignore[misc]
        def __init__(self, inner: Any, passing: _Passing) -> None:
            self._inner, self._passing = inner, passing

        def __iter__(self) -> Iterator[bytes]:
            for piece in self._inner:
                self._passing.see(piece)
                yield piece
            self._passing.end(whole=True)

        def close(self) -> None:
            self._passing.end(whole=False)
            self._inner.close()

    return Stream


def _async_stream(library: Any) -> Any:
    class Stream(library.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, inner: Any, passing: _Passing) -> None:
            self._inner, self._passing = inner, passing

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in self._inner:
                self._passing.see(piece)
                yield piece
            self._passing.end(whole=True)

        async def aclose(self) -> None:
            self._passing.end(whole=False)
            await self._inner.aclose()

    return Stream


def _is_gateway(request: Any) -> bool:
    return request.url.host in ("127.0.0.1", "localhost", "::1")


def _watch_sync(handle: Callable[..., Any], stream: Any) -> Callable[..., Any]:
    @functools.wraps(handle)
    def watched(self: Any, request: Any) -> Any:
        response = handle(self, request)
        if _is_gateway(request):
            response.stream = stream(response.stream, _Passing(request, response))
        return response

    return watched


def _watch_async(handle: Callable[..., Any], stream: Any) -> Callable[..., Any]:
    @functools.wraps(handle)
    async def watched(self: Any, request: Any) -> Any:
        response = await handle(self, request)
        if _is_gateway(request):
            response.stream = stream(response.stream, _Passing(request, response))
        return response

    return watched


def watch(*libraries: Any) -> None:
    """Judge every answer of these libraries' transports from now on, in this process."""
    for library in libraries or (httpx, httpx2):
        sync, both = library.HTTPTransport, library.AsyncHTTPTransport
        sync.handle_request = _watch_sync(sync.handle_request, _sync_stream(library))
        both.handle_async_request = _watch_async(both.handle_async_request, _async_stream(library))
