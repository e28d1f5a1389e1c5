"""Whole files are read for a page in threads of their own, and only while somebody waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request
from starlette.responses import Response

from gateway.page.view import View

#: Files that this process reads at a time, of one tenant one. Online requests need its CPU, and
#: other pages the threads that all share (batches/api/virtual_files.py).
AT_ONCE = 2
#: A file is read for so long at most, in seconds.
LONGEST_S = 60.0


class ClientGone(Exception):
    """Nobody waits for the page any more."""


class TooLong(Exception):
    """The file takes longer than somebody waits for a page."""


class Reading:
    """Watches the reading of a file: what it raises ends that."""

    def __init__(self) -> None:
        self._gone = threading.Event()
        self._until = float("inf")

    def begin(self, longest_s: float = LONGEST_S) -> None:
        """Count the time from now on."""
        self._until = time.monotonic() + longest_s

    def leave(self) -> None:
        """Say that nobody waits; from any thread."""
        self._gone.set()

    def __call__(self) -> None:
        """Return if reading on makes sense.

        Raises:
            ClientGone, TooLong: it does not.
        """
        if self._gone.is_set():
            raise ClientGone
        if time.monotonic() > self._until:
            raise TooLong


async def in_turn(handler: Callable[..., Response], view: View) -> Response:
    """Make a page for which a file is read: when it is its tenant's turn, until its client goes."""
    reading = Reading()
    watcher = asyncio.create_task(_until_gone(view.request, reading))
    turn = _turns.setdefault(view.caller.tenant, asyncio.Lock())
    try:
        async with turn:
            reading()
            work = partial(handler, view, reading=reading)
            return await to_thread.run_sync(work, limiter=_limiter())
    except ClientGone:
        return Response(status_code=499)  # nobody reads it
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def _until_gone(request: Request, reading: Reading) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    reading.leave()


#: By tenant: held by those who wait for it.
_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()


@cache
def _limiter() -> CapacityLimiter:
    return CapacityLimiter(AT_ONCE)
