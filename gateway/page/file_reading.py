"""Reads whole files for a page, in a few threads, while the client is connected."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import cache, partial
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.services import Services
from gateway.page.view import View
from producer.input.reader import Input
from producer.input.tables.source import kind_of

#: Most files that this process reads concurrently, one for each tenant: online requests need its
#: CPU, and other pages need the shared threads.
MAX_READS = 2
#: Most seconds for which one file is read.
MAX_S = 60.0


class ClientGone(Exception):
    """The client has closed its connection."""


class TooLong(Exception):
    """A file is too large for a page, or reading it takes too long."""


class ReadGuard:
    """Ends the reading of a file: the reader calls it regularly, and it may raise."""

    def __init__(self) -> None:
        self._gone = threading.Event()
        self._until = float("inf")

    def start(self, max_s: float = MAX_S) -> None:
        """Begin to count the time."""
        self._until = time.monotonic() + max_s

    def client_gone(self) -> None:
        """Note, from any thread, that the client is gone."""
        self._gone.set()

    def __call__(self) -> None:
        """Return while reading may go on; else raise ClientGone or TooLong."""
        if self._gone.is_set():
            raise ClientGone
        if time.monotonic() > self._until:
            raise TooLong


def lines_of_file(
    services: Services, file_id: str, guard: ReadGuard
) -> Iterator[tuple[int, bytes]]:
    """Yield a file's lines with the same numbers as when it was queued."""
    longest = services.settings.max_line_bytes
    with services.store.local(file_id) as path, closing(Input(str(path), watch=guard)) as source:
        for chunk in source.chunks(None, longest):
            yield from chunk.lines


async def one_at_a_time(handler: Callable[..., Response], view: View) -> Response:
    """Call a file-reading handler, one per tenant at a time, while the client is connected."""
    guard = ReadGuard()
    watcher = asyncio.create_task(_until_gone(view.request, guard))
    lock = _locks.setdefault(view.caller.tenant, asyncio.Lock())
    try:
        async with lock:
            guard()
            return await to_thread.run_sync(partial(handler, view, guard=guard), limiter=_limiter())
    except ClientGone:
        return Response(status_code=499)  # the client is gone
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def _until_gone(request: Request, guard: ReadGuard) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    guard.client_gone()


#: The lock of each tenant; it lives as long as a request holds or awaits it.
_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()


@cache
def _limiter() -> CapacityLimiter:
    return CapacityLimiter(MAX_READS)


def converted_name(name: str) -> str:
    """Return the name of the lines that are made from an uploaded file."""
    return name if name.endswith(".jsonl") else f"{name}.jsonl"


def uploaded_name(name: str) -> str:
    """Return the user's name for a file that may have been made from a table."""
    upload = name.removesuffix(".jsonl")
    return upload if kind_of(upload) else name
