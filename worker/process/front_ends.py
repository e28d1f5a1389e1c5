"""The other front ends of a worker: processes that drain the same queue into the same engine.

`FrontEnd` is the worker's end of one: a process, and a socket with a line of JSON a message, whose
other end is front_end.py.

To Celery and to an operator they are this worker. Each is a drain (front_end.py) with leases of its
own, so one that is killed costs what it held, as a killed worker does, and another takes its place.
They live as long as the engine they feed: when it dies each hands back what it had and ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from worker.drain.events import Events, Stopping
from worker.drain.supervisor import EngineShare
from worker.engine import Attachable, Capacity, Engine
from worker.engine.parent_death import startup_code
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
        command = (sys.executable, "-c", startup_code("end_with_parent") + MAIN, str(its.fileno()))
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


#: How long they may take to hand back what an engine that died, or is ended, had of theirs.
LEAVE_S = 10.0
#: What the report of one that has ended says of what it held.
NOTHING_HELD = {"in_flight": 0, "oldest_s": 0.0, "limit": 0, "slots": 0}


class FrontEndFailed(Exception):
    """A front end could not be started; it has logged why."""


class FrontEnds(EngineShare):
    """All other front ends of one worker: `count` less the one of this process."""

    def __init__(self, worker_id: str, count: int) -> None:
        super().__init__(0, count)
        self._worker_id = worker_id
        #: Of the whole engine; None before it has started.
        self.max_num_seqs: int | None = None
        self._running: dict[int, FrontEnd] = {}
        #: The last reports of those that have ended.
        self._ended: list[dict[str, Any]] = []
        #: Counts that are in neither, or in both, would look like a restart in /metrics' thread.
        self._moving = threading.Lock()
        self._keepers: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup
        self._loop: asyncio.AbstractEventLoop
        #: What they were told, which those that come later must hear too.
        self._paused, self._watched, self._told_to = False, False, ""
        #: Celery's task events that were told by those that have ended.
        self._left: list[dict[str, Any]] = []

    def subscribe(self, events: Events) -> None:
        """Stop them when the worker is told to stop."""
        events.subscribe(Stopping, lambda told: self._stop("stop" if told.within_s else "hurry"))

    async def run(self) -> None:
        """Keep them until cancelled.

        Raises:
            FrontEndFailed: one cannot be started.
        """
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as self._group:
            await asyncio.Event().wait()

    def reports(self) -> list[dict[str, Any]]:
        """Return what each has told latest of itself; of those that have ended, their counts.

        In any thread.
        """
        with self._moving:
            return [*self._ended, *(one.report for one in self._running.values() if one.report)]

    def revoke(self, request_ids: list[str]) -> None:
        """Abort those of these requests that run in them; called in any thread."""
        for one in list(self._running.values()):
            self._loop.call_soon_threadsafe(partial(one.tell, do="revoke", ids=request_ids))

    async def active(self) -> list[dict[str, Any]]:
        """Return the requests that they have in flight, as `inspect active` lists them."""
        asked = (one.ask("active") for one in self._running.values())
        return [each for part in await asyncio.gather(*asked) for each in part or ()]

    def watch(self, on: bool) -> None:
        """Let them gather Celery's task events, or no longer."""
        self._watched = on
        for one in self._running.values():
            one.tell(do="watch", on=on)

    def task_events(self) -> list[dict[str, Any]]:
        """Return the task events that they have told since the last call. In any thread."""
        with self._moving:
            found, self._left = self._left, []
            return found + [told for one in self._running.values() for told in one.take_events()]

    # -- what the drain tells -----------------------------------------------------

    def share(self, capacity: Capacity) -> Capacity:
        """Return this process' part of what the engine can take."""
        self.max_num_seqs = capacity.max_num_seqs
        return super().share(capacity)

    def begin(self, engine: Engine) -> None:
        """Start them over an engine that has started; this front end begins without them."""
        self._told_to = ""
        if self.count > 1:
            log.info(
                "starting %d more front ends: each has its share of %d requests at once",
                self.count - 1,
                self.max_num_seqs,
                extra={"action": "front_ends_start"},
            )
        for number in range(1, self.count):
            keeper = self._group.create_task(self._keep(number, engine))
            self._keepers.add(keeper)
            keeper.add_done_callback(self._keepers.discard)

    async def end(self, *, died: bool) -> None:
        """Let them leave the engine; kill those that have not left in time."""
        for told in ("died", "hurry") if died else ("hurry",):
            self._stop(told)
            if self._keepers:
                await asyncio.wait(self._keepers, timeout=LEAVE_S / 2)
        for keeper in (left := list(self._keepers)):
            log.warning(
                "a front end does not end: it is killed", extra={"action": "front_end_hangs"}
            )
            keeper.cancel()
        if left:
            await asyncio.wait(left)

    async def pause(self) -> None:
        """Let them take nothing more, until nothing of theirs is in flight."""
        self._paused = True
        await asyncio.gather(*(one.pause() for one in self._running.values()))

    def resume(self) -> None:
        """Let them go on."""
        self._paused = False
        for one in self._running.values():
            one.tell(do="resume")

    async def ended(self) -> None:
        """Wait until all have ended, which were told to stop."""
        if not self._told_to:
            self._stop("stop")
        if self._keepers:
            await asyncio.wait(self._keepers)

    def _stop(self, how: str) -> None:
        self._told_to = how
        for one in self._running.values():
            one.tell(do=how)

    # -- one of them --------------------------------------------------------------

    async def _keep(self, number: int, engine: Engine) -> None:
        """Keep one running for as long as its engine does."""
        assert isinstance(engine, Attachable)  # noqa: S101 - the catalogue says which engines do
        while not self._told_to and not engine.dead():
            client = engine.new_client()
            if client is None:
                log.error(
                    "front ends have died too often: the engine is built anew",
                    extra={"action": "front_ends_die"},
                )
                engine.kill()
                return
            one = await self._run_one(number, client)
            if self._told_to or engine.dead():
                return
            if (code := one.process.returncode) and code > 0 and not one.report:
                raise FrontEndFailed(
                    f"front end {number + 1} ended with exit status {code}; its own lines say why"
                )
            log.warning(
                "front end %d has died: what it held returns to the queue (%s), "
                "and another is started",
                number + 1,
                await _client_aborted(engine, client),
                extra={"action": "front_end_died"},
            )

    async def _ended_or_killed(self, one: FrontEnd) -> None:
        """Wait until one has ended; one that hangs is killed."""
        ends = asyncio.create_task(one.process.wait())
        hangs = asyncio.create_task(one.hangs())
        try:
            await asyncio.wait({ends, hangs}, return_when=asyncio.FIRST_COMPLETED)
            if not ends.done():
                log.warning(
                    "front end %d is killed: %s",
                    one.number + 1,
                    hangs.result(),
                    extra={"action": "front_end_hangs"},
                )
                one.process.kill()
            await ends
        finally:
            ends.cancel()
            hangs.cancel()

    async def _run_one(self, number: int, client: dict[str, Any]) -> FrontEnd:
        """Run one to its end."""
        order = {
            "client": client, "number": number, "count": self.count, "worker": self._worker_id,
            "level": logging.root.level, "paused": self._paused, "watched": self._watched,
        }  # fmt: skip
        try:
            async with FrontEnd.started(number, order) as one:
                with self._moving:
                    self._running[number] = one
                if self._told_to:
                    one.tell(do=self._told_to)
                await self._ended_or_killed(one)
        finally:
            with self._moving:
                ended = self._running.pop(number, None)
                if ended is not None:
                    self._left += ended.take_events()
                if ended is not None and ended.report:
                    self._ended.append(ended.report | NOTHING_HELD)
        return one


async def _client_aborted(engine: Attachable, client: dict[str, Any]) -> str:
    """Let the engine abort what a front end had in it, and say how that ended."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return f"{await engine.abort_client(client)} requests were aborted in the engine"
    except Exception as error:  # the engine may have died as well, which the drain will see
        reason = str(error) or f"no answer in {ANSWER_S:.0f} s"
        return f"the engine did not say that it aborted its requests: {reason}"
