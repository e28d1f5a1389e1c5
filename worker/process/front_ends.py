"""The other front ends of a worker: processes that drain the same queue into the same engine.

To Celery and to an operator they are this worker. Each is a drain (front_end.py) with leases of its
own, so one that is killed costs what it held, as a killed worker does, and another takes its place.
They live as long as the engine they feed: when it dies each hands back what it had and ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import orjson

from worker.drain.events import Events, Stopping
from worker.drain.others import Share
from worker.engine import Capacity, Engine, Shares

log = logging.getLogger(__name__)

#: How long they may take to hand back what an engine that died, or is ended, had of theirs.
LEAVE_S = 10.0
#: How long an answer of theirs is waited for.
ANSWER_S = 2.0


MAIN = "from worker.process.front_end import main; main()"


class FrontEndFailed(Exception):
    """A front end could not be started; it has logged why."""


class FrontEnd:
    """One process, and the connection to it; each message is a line of JSON."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self.process = process
        #: What it told latest of itself: `in_flight`, `limit`, `counts`; empty until it is ready.
        self.report: dict[str, Any] = {}
        self._writer: asyncio.StreamWriter
        self._answer: asyncio.Future[Any] | None = None

    @classmethod
    @asynccontextmanager
    async def started(cls, number: int, order: dict[str, Any]) -> AsyncIterator[FrontEnd]:
        """Start one and tell it what to feed; it is killed at the end, if it has not ended."""
        ours, its = socket.socketpair()
        # With this process' own path: `-m` would look into the current folder first.
        code = f"import sys; sys.path[:] = {sys.path!r}; {MAIN}"
        command = (sys.executable, "-c", code, str(its.fileno()))
        with its:
            process = await asyncio.create_subprocess_exec(*command, pass_fds=[its.fileno()])
        found = cls(number, process)
        reader, found._writer = await asyncio.open_connection(sock=ours)
        listening = asyncio.create_task(found._listen(reader))
        try:
            found.tell(**order)
            yield found
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            listening.cancel()
            found._writer.close()

    def tell(self, **message: Any) -> None:
        """Send a message; one that has ended does not hear it."""
        self._writer.write(orjson.dumps(message) + b"\n")

    async def ask(self, what: str, within_s: float | None = ANSWER_S) -> Any:
        """Ask it something, and return its answer; None if it has ended, or is too slow."""
        self._answer = asyncio.get_running_loop().create_future()
        self.tell(do=what)
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._answer, within_s)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            async for line in reader:
                message = orjson.loads(line)
                if "report" in message:
                    self.report = message["report"]
                elif self._answer is not None and not self._answer.done():
                    self._answer.set_result(message["answer"])
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)


class FrontEnds(Share):
    """All other front ends of one worker: `count` less the one of this process."""

    def __init__(self, worker_id: str, count: int) -> None:
        super().__init__(0, count)
        self._worker_id = worker_id
        #: Of the whole engine; None before it has started.
        self.max_num_seqs: int | None = None
        self._running: dict[int, FrontEnd] = {}
        self._keepers: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup
        self._loop: asyncio.AbstractEventLoop
        #: What they were told, which those that come later must hear too.
        self._paused, self._told_to = False, ""

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
        """Return what those that are ready have told latest of themselves."""
        return [one.report for one in self._running.values() if one.report]

    def revoke(self, request_ids: list[str]) -> None:
        """Abort those of these requests that run in them; called in any thread."""
        for one in list(self._running.values()):
            self._loop.call_soon_threadsafe(partial(one.tell, do="revoke", ids=request_ids))

    async def active(self) -> list[dict[str, Any]]:
        """Return the requests that they have in flight, as `inspect active` lists them."""
        asked = (one.ask("active") for one in self._running.values())
        return [each for part in await asyncio.gather(*asked) for each in part or ()]

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
            if not self._keepers or (await asyncio.wait(self._keepers, timeout=LEAVE_S / 2))[1]:
                continue
            break
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
        waited = (one.ask("pause", None) for one in self._running.values())
        await asyncio.gather(*waited)

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
        assert isinstance(engine, Shares)  # noqa: S101 - the catalogue says which engines do
        while not self._told_to and not engine.dead():
            seat = engine.seat()
            if seat is None:
                log.error(
                    "front ends have died too often: the engine is built anew",
                    extra={"action": "front_ends_die"},
                )
                engine.kill()
                return
            code = await self._run_one(number, seat)
            if self._told_to or engine.dead():
                return
            if code > 0:
                raise FrontEndFailed(
                    f"front end {number + 1} ended with exit status {code}; its own lines say why"
                )
            aborted = await engine.vacate(seat)
            log.warning(
                "front end %d was killed: what it held returns to the queue (%d requests were "
                "aborted in the engine), and another is started",
                number + 1,
                aborted,
                extra={"action": "front_end_died"},
            )

    async def _run_one(self, number: int, seat: dict[str, Any]) -> int:
        order = {
            "seat": seat, "number": number, "count": self.count, "worker": self._worker_id,
            "level": logging.root.level, "paused": self._paused,
        }  # fmt: skip
        async with FrontEnd.started(number, order) as one:
            self._running[number] = one
            if self._told_to:
                one.tell(do=self._told_to)
            try:
                return await one.process.wait()
            finally:
                del self._running[number]
