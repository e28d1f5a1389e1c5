"""Starts further front ends: processes that take requests of the same queue for the same engine.

A `FrontEnd` has a process and the worker's end of a socket, on which each message is a line of
JSON. The other end is in front_end.py.

Celery and operators see one worker. Each front end is a drain with its own leases. If one is
killed, its requests in flight return to the queue like those of a killed worker, and another is
started. When the engine dies, each front end hands back its requests and ends.
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
from worker.telemetry.task_events import MOST_WAITING, TaskEvent, pop_all

log = logging.getLogger(__name__)

#: The program of a front end's process, for `python -c`.
MAIN = "from worker.process.front_end import main; main()"
#: Most bytes of a message; asyncio's default of 64 KiB is too few for 300 requests in flight.
LINE_BYTES = 2**28
#: Most seconds of waiting for an answer.
ANSWER_S = 2.0
#: Seconds between two checks for reports.
CHECK_S = 1.0
#: Seconds without a report after which a suspended process is killed, and after which a warning
#: about any other process is logged; multiples of CHECK_S.
SILENT_S, WARN_S = 5.0, 15.0
#: Seconds without a report after which a process that must pause is killed, since suspects wait.
PAUSE_S = 30.0
#: Seconds that front ends may take to hand back requests of an engine that died or is shut down.
LEAVE_S = 10.0
#: The fields that replace those of the last report of a front end that has ended.
NOTHING_HELD = {"in_flight": 0, "oldest_s": 0.0, "limit": 0, "slots": 0}


async def opened(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the streams of one end of a socket."""
    return await asyncio.open_connection(sock=connection, limit=LINE_BYTES)


class FrontEnd:
    """The process of one front end, and the connection to it."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self.process = process
        #: The process's latest report (worker/telemetry/reports.py); empty until it is ready.
        self.report: dict[str, Any] = {}
        self.task_events: deque[TaskEvent] = deque(maxlen=MOST_WAITING)
        self._writer: asyncio.StreamWriter
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._closed = False
        self._reports = 0

    @classmethod
    @asynccontextmanager
    async def started(cls, number: int, order: dict[str, Any]) -> AsyncIterator[FrontEnd]:
        """Start a process and send it `order`; kill it when the block ends."""
        ours, its = socket.socketpair()
        command = (sys.executable, "-c", startup_code("end_with_parent") + MAIN, str(its.fileno()))
        with its:
            process = await asyncio.create_subprocess_exec(*command, pass_fds=[its.fileno()])
        front_end = cls(number, process)
        reader, front_end._writer = await opened(ours)
        listening = asyncio.create_task(front_end._listen(reader))
        try:
            front_end.send(**order)
            yield front_end
        finally:
            front_end.kill()
            await listening  # until all its messages are read
            front_end._writer.close()

    def send(self, **message: Any) -> None:
        """Send a message; it is lost if the process has ended."""
        self._writer.write(orjson.dumps(message) + b"\n")

    def kill(self) -> None:
        """Kill the process, if it has not ended."""
        with suppress(ProcessLookupError):
            self.process.kill()

    def take_events(self) -> list[TaskEvent]:
        """Return the task events since the last call; any thread may call this."""
        return pop_all(self.task_events)

    async def ask(self, what: str, within_s: float | None = ANSWER_S) -> Any:
        """Send the order `what`, and return the answer; None if none arrives within `within_s`."""
        if self._closed:
            return None
        answer = self._answers.get(what)
        if answer is None:
            answer = self._answers[what] = asyncio.get_running_loop().create_future()
            self.send(do=what)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await asyncio.shield(answer)

    async def pause(self) -> None:
        """Let the process take no more requests; return when it has none in flight.

        A process that sends no report for PAUSE_S is killed. One that has never sent a report has
        no requests, and reads this order before it takes any: it is not killed.
        """
        reports_before = -1
        while reports_before != self._reports:
            reports_before = self._reports
            await self.ask("pause", PAUSE_S)
            if "pause" not in self._answers:
                return
        if self.report:
            self._kill_hanging(f"it was asked to pause, and has sent no report for {PAUSE_S:g} s")

    def _kill_hanging(self, reason: str) -> None:
        log.warning(
            "front end %d is killed: %s",
            self.number + 1,
            reason,
            extra={"action": "front_end_hangs"},
        )
        self.kill()

    async def wait_for_end(self) -> None:
        """Wait until the process has ended; kill it if it is suspended for SILENT_S.

        The process reports every second. One whose loop hangs is not killed: it ends by itself
        (loop_watch.py), and knows the request that caused this. A suspended process, for example
        after SIGSTOP, cannot.
        """
        # One task serves all checks, because each call of process.wait() would keep a future.
        end = asyncio.create_task(self.process.wait())
        silent_s, reports = 0.0, -1
        try:
            # A sum of checks, not a clock's time, as this process may have been suspended as well.
            while not (await asyncio.wait([end], timeout=CHECK_S))[0]:
                silent_s = silent_s + CHECK_S if reports == self._reports else 0.0
                reports = self._reports
                self._check_silence(silent_s)
        finally:
            end.cancel()

    def _check_silence(self, silent_s: float) -> None:
        if silent_s >= SILENT_S and _is_suspended(self.process.pid):
            self._kill_hanging(f"it is suspended, and has sent no report for {silent_s:g} s")
        elif silent_s == WARN_S and self.report:  # without a report it is still starting
            log.warning(
                "front end %d has sent no report for %g s: its event loop hangs, or this machine "
                "is overloaded",
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
        self._closed = True
        for answer in self._answers.values():
            answer.set_result(None)


def _is_suspended(pid: int) -> bool:
    """Return whether a process is suspended, by SIGSTOP or a debugger."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # the process has ended
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")


class FrontEndFailed(Exception):
    """A front end could not be started; its process has logged the reason."""


class FrontEnds(EngineShare):
    """The further front ends of one worker; `count` also counts the drain in this process."""

    def __init__(self, worker_id: str, count: int) -> None:
        super().__init__(0, count)
        self._worker_id = worker_id
        #: The slots of the whole engine; None before it has started.
        self.max_num_seqs: int | None = None
        self._running: dict[int, FrontEnd] = {}
        #: The last reports of front ends that have ended.
        self._ended: list[dict[str, Any]] = []
        #: Guards the move of a report from `_running` to `_ended`: counts that were in neither or
        #: in both would look like a restart in /metrics.
        self._moving = threading.Lock()
        self._keepers: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup
        self._loop: asyncio.AbstractEventLoop
        #: The latest orders, for front ends that start later.
        self._paused, self._watched, self._stopped_by = False, False, ""
        #: The task events of front ends that have ended.
        self._left_events: list[TaskEvent] = []

    def subscribe(self, events: Events) -> None:
        """Stop the front ends when the worker stops."""
        events.subscribe(Stopping, lambda event: self._stop("stop" if event.within_s else "hurry"))

    async def run(self) -> None:
        """Keep the front ends running until cancelled.

        Raises:
            FrontEndFailed: one cannot be started.
        """
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as self._group:
            await asyncio.Event().wait()

    def reports(self) -> list[dict[str, Any]]:
        """Return the last report of each front end, also of ended ones; any thread may call."""
        with self._moving:
            return [*self._ended, *(one.report for one in self._running.values() if one.report)]

    def revoke(self, request_ids: list[str]) -> None:
        """Abort those of the requests that front ends run; any thread may call this."""
        for one in list(self._running.values()):
            self._loop.call_soon_threadsafe(partial(one.send, do="revoke", ids=request_ids))

    async def active(self) -> list[dict[str, Any]]:
        """Return the front ends' requests in flight, as `inspect active` lists them."""
        asked = (one.ask("active") for one in self._running.values())
        return [each for answer in await asyncio.gather(*asked) for each in answer or ()]

    def watch(self, on: bool) -> None:
        """Make the front ends gather Celery's task events, or stop that."""
        self._watched = on
        self._send_all(do="watch", on=on)

    def task_events(self) -> list[TaskEvent]:
        """Return the front ends' task events since the last call; any thread may call this."""
        with self._moving:
            events, self._left_events = self._left_events, []
            return events + [each for one in self._running.values() for each in one.take_events()]

    def _send_all(self, **message: Any) -> None:
        for one in self._running.values():
            one.send(**message)

    # -- called by the drain ------------------------------------------------------

    def share(self, capacity: Capacity) -> Capacity:
        """Return this process's share of the engine's capacity."""
        self.max_num_seqs = capacity.max_num_seqs
        return super().share(capacity)

    def begin(self, engine: Engine) -> None:
        """Start the front ends of an engine that has started; do not wait for them."""
        self._stopped_by = ""
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
        """Make the front ends leave the engine; kill those that take longer than LEAVE_S."""
        for how in ("died", "hurry") if died else ("hurry",):
            self._stop(how)
            if self._keepers:
                await asyncio.wait(self._keepers, timeout=LEAVE_S / 2)
        for keeper in (late := list(self._keepers)):
            log.warning(
                "a front end does not end: it is killed", extra={"action": "front_end_hangs"}
            )
            keeper.cancel()
        if late:
            await asyncio.wait(late)

    async def pause(self) -> None:
        """Let the front ends take no more requests; return when they have none in flight."""
        self._paused = True
        await asyncio.gather(*(one.pause() for one in self._running.values()))

    def resume(self) -> None:
        """Let the front ends take requests again."""
        self._paused = False
        self._send_all(do="resume")

    async def stop_peers(self) -> None:
        """Stop the front ends, if they are not stopping, and wait until all have ended."""
        if not self._stopped_by:
            self._stop("stop")
        if self._keepers:
            await asyncio.wait(self._keepers)

    def _stop(self, how: str) -> None:
        self._stopped_by = how
        self._send_all(do=how)

    # -- one front end ------------------------------------------------------------

    async def _keep(self, number: int, engine: Engine) -> None:
        """Keep one front end running until the engine has died or is stopped."""
        assert isinstance(engine, Attachable)  # noqa: S101 - the catalogue checks this
        while not self._stopped_by and not engine.dead():
            client = engine.new_client()
            if client is None:
                log.error(
                    "front ends have died too often: the engine is rebuilt",
                    extra={"action": "front_ends_die"},
                )
                engine.kill()
                return
            one = await self._run_one(number, client)
            if self._stopped_by or engine.dead():
                return
            if (code := one.process.returncode) and code > 0 and not one.report:
                raise FrontEndFailed(
                    f"front end {number + 1} ended with exit status {code}; its log lines above "
                    "state why"
                )
            log.warning(
                "front end %d has died: its requests in flight return to the queue (%s), "
                "and another is started",
                number + 1,
                await _abort_client(engine, client),
                extra={"action": "front_end_died"},
            )

    async def _run_one(self, number: int, client: dict[str, Any]) -> FrontEnd:
        """Start one front end, and wait until it has ended."""
        order = {
            "client": client, "number": number, "count": self.count, "worker": self._worker_id,
            "level": logging.root.level, "paused": self._paused, "watched": self._watched,
        }  # fmt: skip
        try:
            async with FrontEnd.started(number, order) as one:
                with self._moving:
                    self._running[number] = one
                if self._stopped_by:
                    one.send(do=self._stopped_by)
                await one.wait_for_end()
        finally:
            with self._moving:
                ended = self._running.pop(number, None)
                if ended is not None:
                    self._left_events += ended.take_events()
                    if ended.report:
                        self._ended.append(ended.report | NOTHING_HELD)
        return one


async def _abort_client(engine: Attachable, client: dict[str, Any]) -> str:
    """Abort a dead front end's requests in the engine; return log text about the result."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return f"{await engine.abort_client(client)} requests were aborted in the engine"
    except Exception as error:  # the engine may have died, too, which the drain notices
        reason = str(error) or f"no answer in {ANSWER_S:.0f} s"
        return f"the engine did not confirm that it aborted its requests: {reason}"
