"""A TCP proxy that misbehaves on demand: between a client and Redis, in a thread of its own.

Faults are set from the test's thread and hold for every connection:

    proxy.fault = Fault(delay_s=0.2)            replies come late
    proxy.fault = Fault(swallow=True)           half-open: accepted, read, never answered
    proxy.drop_reply(b"warmq:lease_seq")        the next command with that text is executed,
                                                its reply lost, its connection reset
    proxy.delay_reply(b"warmq:lease_seq", 1.5)  its reply comes so many seconds late
    proxy.reset()                               every open connection ends with RST
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

READ = 2**16
#: Bytes of the request before that a mark may have begun in.
LONGEST_MARK = 64
#: SO_LINGER on, 0 seconds: closing sends RST instead of FIN.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to every byte; the default is nothing."""

    delay_s: float = 0.0
    #: Connections that carry anything meanwhile stay deaf for ever, as behind a lost NAT entry.
    swallow: bool = False
    #: Reset each connection after so many bytes of replies on it: replies are cut short.
    truncate_after: int | None = None


class _Link:
    """One client's connection and its way to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.ends = (client, server)
        self.lose_replies = False
        self.late_s = 0.0
        self.deaf = False
        self.replied = 0

    def reset(self) -> None:
        for end in self.ends:
            sock = end.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            end.transport.abort()


class Proxy:
    """Listens on a loopback port and passes everything on to `target_port`, faults aside."""

    def __init__(self, target_port: int) -> None:
        self.fault = Fault()
        self.dropped = threading.Event()
        self.delayed = threading.Event()
        self.accepted = 0
        self._target_port = target_port
        #: What to look for in requests, and how late their replies come; None: never.
        self._marks: list[tuple[bytes, float | None]] = []
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="proxy", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event
        self.port = 0

    @property
    def url(self) -> str:
        """The Redis URL of this side."""
        return f"redis://127.0.0.1:{self.port}/0"

    def drop_reply(self, mark: bytes) -> None:
        """Lose the reply of the next command that contains `mark`; `dropped` is set then."""
        self.dropped.clear()
        self._marks.append((mark, None))

    def delay_reply(self, mark: bytes, seconds: float) -> None:
        """Let the reply of the next command that contains `mark` come late; `delayed` is set
        when it has come."""
        self.delayed.clear()
        self._marks.append((mark, seconds))

    def forget_marks(self) -> None:
        """Look for nothing any more."""
        self._marks.clear()

    def reset(self) -> None:
        """End every open connection with RST."""
        self._call(lambda: [link.reset() for link in list(self._links)])

    def deafen(self, upstream_port: int) -> None:
        """Let one connection stand, as Redis sees it by its port, and pass nothing more on it."""

        def deafen() -> None:
            for link in self._links:
                if link.ends[1].get_extra_info("sockname")[1] == upstream_port:
                    link.deaf = True

        self._call(deafen)

    def _call(self, what: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            what()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(10)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.fault = Fault()
        self._call(self._end.set)
        self._thread.join(10)

    # -- the proxy's thread -------------------------------------------------------

    def _main(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        for link in list(self._links):
            link.reset()
        await _ended(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, to_server)
        self._links.add(link)
        try:
            ways = (self._requests(link, reader), self._replies(link, from_server))
            await _first_of(asyncio.ensure_future(way) for way in ways)
        finally:
            self._links.discard(link)
            for end in link.ends:
                end.close()

    async def _requests(self, link: _Link, reader: asyncio.StreamReader) -> None:
        before = b""
        while data := await reader.read(READ):
            self._look_for_marks(link, before, data)
            before = (before + data)[-LONGEST_MARK:]
            if self.fault.swallow:
                link.deaf = True
            if not link.deaf:
                link.ends[1].write(data)
                await link.ends[1].drain()

    def _look_for_marks(self, link: _Link, before: bytes, data: bytes) -> None:
        """Do what the first mark says that ends in this data; equal ones wait for the next."""
        for wanted in self._marks:
            mark, late_s = wanted
            if mark in before[1 - len(mark) :] + data:
                self._marks.remove(wanted)
                link.lose_replies = late_s is None
                link.late_s = late_s or 0.0
                return

    async def _replies(self, link: _Link, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(READ):
            if link.lose_replies:
                link.reset()
                self.dropped.set()
                return
            if late_s := link.late_s:
                link.late_s = 0.0
                await asyncio.sleep(late_s)
                self.delayed.set()
            fault = self.fault
            if fault.delay_s:
                await asyncio.sleep(fault.delay_s)
            if fault.swallow or link.deaf:
                link.deaf = True
                continue
            if fault.truncate_after is not None:
                left = fault.truncate_after - link.replied
                data = data[: max(0, left)]
            link.replied += len(data)
            link.ends[0].write(data)
            await link.ends[0].drain()
            if fault.truncate_after is not None and link.replied >= fault.truncate_after:
                link.reset()
                return


async def _first_of(ways: Iterable[asyncio.Future[None]]) -> None:
    """Run until one way has ended; the other is of no use then."""
    pending = set(ways)
    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    for way in pending:
        way.cancel()
    await asyncio.wait(done | pending)
    for way in done | pending:
        if not way.cancelled():
            way.exception()  # a broken connection is what this is all about


async def _ended(tasks: set[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(set(tasks), timeout=5)
