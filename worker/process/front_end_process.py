"""The worker's end of one front end: a process, and a socket with a line of JSON a message.

The other end is front_end.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from worker.engine.tie import first_line
from worker.telemetry.task_events import MOST_WAITING, taken

log = logging.getLogger(__name__)

MAIN = "from worker.process.front_end import main; main()"
#: Most bytes of a message: asyncio's own limit is 64 KiB, which 300 requests in flight exceed.
LINE_BYTES = 2**28
#: How long an answer is waited for.
ANSWER_S = 2.0
#: Between two looks whether it tells of itself; how long one that is suspended may be silent, and
#: after how long any other is logged. All are multiples of the first.
LOOK_S, SILENT_S, WARN_S = 1.0, 5.0, 15.0
#: How long one that is to take nothing more may be silent: whoever runs suspects waits for it.
PAUSE_S = 30.0


async def opened(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the streams of either end of the socket."""
    return await asyncio.open_connection(sock=connection, limit=LINE_BYTES)


class FrontEnd:
    """One process, and the connection to it; each message is a line of JSON."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self.process = process
        #: What it told latest of itself: `in_flight`, `limit`, `counts`; empty until it is ready.
        self.report: dict[str, Any] = {}
        #: What it has told of its requests since somebody asked for that.
        self.task_events: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)
        self._writer: asyncio.StreamWriter
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._silent = False
        self._reports = 0

    @classmethod
    @asynccontextmanager
    async def started(cls, number: int, order: dict[str, Any]) -> AsyncIterator[FrontEnd]:
        """Start one and tell it what to feed; it is killed at the end, if it has not ended."""
        ours, its = socket.socketpair()
        command = (sys.executable, "-c", first_line("tie") + MAIN, str(its.fileno()))
        with its:
            process = await asyncio.create_subprocess_exec(*command, pass_fds=[its.fileno()])
        found = cls(number, process)
        reader, found._writer = await opened(ours)
        listening = asyncio.create_task(found._listen(reader))
        try:
            found.tell(**order)
            yield found
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await listening  # to the end of what it has told
            found._writer.close()

    def tell(self, **message: Any) -> None:
        """Send a message; one that has ended does not hear it."""
        self._writer.write(orjson.dumps(message) + b"\n")

    def take_events(self) -> list[dict[str, Any]]:
        """Return the task events that came since the last call. In any thread."""
        return taken(self.task_events)

    async def ask(self, what: str, within_s: float | None = ANSWER_S) -> Any:
        """Ask it something, and return its answer; None if it has ended, or is too slow."""
        if self._silent:
            return None
        answer = self._answers.get(what)
        if answer is None:
            answer = self._answers[what] = asyncio.get_running_loop().create_future()
            self.tell(do=what)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await asyncio.shield(answer)

    async def pause(self) -> None:
        """Let it take nothing more; return when nothing of its is in flight.

        One that tells nothing for PAUSE_S meanwhile is killed. If it has told nothing at all, it is
        left: it holds nothing, and will hear of the pause before it takes anything.
        """
        heard = -1
        while heard != self._reports:
            heard = self._reports
            await self.ask("pause", PAUSE_S)
            if "pause" not in self._answers:
                return
        if self.report:
            log.warning(
                "front end %d is killed: it is to take nothing more, and has told nothing for %g s",
                self.number + 1,
                PAUSE_S,
                extra={"action": "front_end_hangs"},
            )
            with suppress(ProcessLookupError):
                self.process.kill()

    async def hangs(self) -> str:
        """Return why it is to be killed, once it has been suspended for SILENT_S.

        It tells of itself every second. A process whose loop stands ends by itself (loop_watch.py),
        and knows which request is to blame; one that was suspended, as by SIGSTOP, does neither.
        """
        silent_s, reports = 0.0, -1
        while True:
            # Looks are counted, not seconds: this process may have been suspended as well.
            await asyncio.sleep(LOOK_S)
            if reports != self._reports:
                silent_s, reports = 0.0, self._reports
                continue
            silent_s += LOOK_S
            if silent_s >= SILENT_S and _is_suspended(self.process.pid):
                return f"it is suspended, and has told nothing for {silent_s:g} s"
            if silent_s == WARN_S and self.report:  # else it still starts
                log.warning(
                    "front end %d has told nothing for %g s: its event loop stands, or this "
                    "machine has too much to do",
                    self.number + 1,
                    silent_s,
                    extra={"action": "front_end_silent"},
                )

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            async for line in reader:
                message = orjson.loads(line)
                if "report" in message:
                    self.report = message["report"]
                    self._reports += 1
                elif "task_events" in message:
                    self.task_events.extend(message["task_events"])
                elif answer := self._answers.pop(message["to"], None):
                    answer.set_result(message["answer"])
        self._silent = True
        for answer in self._answers.values():
            answer.set_result(None)


def _is_suspended(pid: int) -> bool:
    """Return whether a process does not run although it could: SIGSTOP, a debugger."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")
