"""Runs the process of a further front end: a second drain in front of the worker's engine.

The worker starts the process (front_ends.py). The process reads the worker's settings itself, and
the worker's orders from an inherited socket. If the worker dies, the process hands back its
requests and ends; a process that is not ready yet has no requests, and ends immediately.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import uuid
from contextlib import suppress
from typing import Any

import orjson

from contract.errors import EngineDead
from contract.log_lines import set_up
from worker.drain.drain import Drain
from worker.drain.events import EngineReady
from worker.drain.leases import Leases
from worker.drain.lifecycle import STOP_S, ExitTimer
from worker.drain.loop import run_drain
from worker.drain.side_tasks import SideTasks
from worker.drain.supervisor import EngineShare
from worker.engine.catalogue import attach_engine, load_settings
from worker.engine.parent_death import outlive_parent
from worker.process.bootstep import YOUNG_OBJECTS
from worker.process.front_ends import opened
from worker.process.loop_watch import LoopWatch
from worker.telemetry.reports import EventTotals, as_task, report_of
from worker.telemetry.task_events import REQUESTS_PER_S, TaskEvents
from worker.telemetry.traces import trace_requests, traces

log = logging.getLogger(__name__)

#: Seconds between two reports to the worker.
REPORT_S = 1.0


class FrontEndProcess:
    """The drain of this process, which obeys the worker and sends it reports."""

    def __init__(
        self, order: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        share = EngineShare(order["number"], order["count"])
        # Only the worker rebuilds the engine, and only its loop writes the heartbeat file.
        settings = share.settings(load_settings(rebuild_tries=0, heartbeat_file=None))
        worker = order["worker"]
        worker_id = f"{worker.rsplit('.', 2)[0]}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        self._leases = Leases(settings, worker_id, part_of=worker)
        self.drain = Drain(settings, self._leases, lambda: attach_engine(settings, order["client"]))
        self.drain.supervisor.peers = share
        self.drain.paused = order["paused"]
        self._side_tasks = SideTasks(self.drain)
        self._totals = EventTotals(self.drain.events) if settings.metrics_port else None
        self._task_events = TaskEvents(self.drain.events, REQUESTS_PER_S / share.count)
        self._task_events.switch(order["watched"])
        self._reader, self._writer = reader, writer
        self._exit_timer = ExitTimer()
        self._worker_pidfd = os.pidfd_open(os.getppid())
        self._ready = asyncio.Event()
        self.drain.events.subscribe(EngineReady, self._begin)

    async def run(self) -> None:
        """Run requests until the worker stops this process, or ends."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop)
        tasks = [*self._side_tasks.tasks(), self._obey(), self._report()]
        try:
            with LoopWatch(self.drain), traces(self.drain.settings):
                trace_requests(self.drain)
                await run_drain(self.drain, tasks)
        finally:
            if self._ready.is_set():
                self._send_report()
                with suppress(ConnectionError):
                    await self._writer.drain()
            await self._leases.close()

    def _begin(self, _: EngineReady) -> None:
        """Start to report; from now on, survive the worker's end until requests are handed back."""
        outlive_parent()
        threading.Thread(target=self._await_worker_end, name="worker's end", daemon=True).start()
        self._ready.set()

    def _await_worker_end(self) -> None:
        """Limit the time after the worker's end, also if this process's event loop hangs."""
        select.select([self._worker_pidfd], (), ())
        self._exit_timer.within(STOP_S)

    async def _obey(self) -> None:
        async for line in self._reader:
            message = orjson.loads(line)
            match message["do"]:
                case "stop":
                    self._stop()
                case "hurry":
                    self._hurry()
                case "died":
                    self.drain.supervisor.kill()
                case "pause":
                    self.drain.pause(True)
                    self._waiting = asyncio.create_task(self._answer_when_idle())
                case "resume":
                    self.drain.pause(False)
                case "watch":
                    self._task_events.switch(message["on"])
                case "revoke":
                    self._side_tasks.cancels.abort(message["ids"])
                case "active":
                    tasks = [as_task(one, os.getpid()) for one in self.drain.in_flight]
                    self._send(to="active", answer=tasks)
        self._hurry()  # the socket is closed: the worker has ended

    def _stop(self) -> None:
        self._exit_timer.within(self.drain.settings.drain_timeout_s + STOP_S)
        self.drain.stop()

    def _hurry(self) -> None:
        self._exit_timer.within(STOP_S)
        self.drain.hurry()

    async def _report(self) -> None:
        await self._ready.wait()
        while True:
            self._send_report()
            await asyncio.sleep(REPORT_S)

    def _send_report(self) -> None:
        self._send(report=report_of(self.drain, self._totals))
        if events := self._task_events.take():
            self._send(task_events=events)

    async def _answer_when_idle(self) -> None:
        await self.drain.idle.wait()
        self._send(to="pause", answer=None)

    def _send(self, **message: Any) -> None:
        self._writer.write(orjson.dumps(message) + b"\n")


async def _main(connection: socket.socket) -> None:
    reader, writer = await opened(connection)
    order = orjson.loads(await reader.readline())
    name = f"front end {order['number'] + 1}"
    multiprocessing.current_process().name = name
    form = "[%(asctime)s: %(levelname)s/%(processName)s] %(message)s"
    process = FrontEndProcess(order, reader, writer)
    set_up(process.drain.settings.log_format, form, order["level"])
    try:
        await process.run()
    except* EngineDead:
        log.info("%s ends with its engine", name, extra={"action": "front_end_ended"})


def main() -> None:
    """Run until stopped; exit with 0, or with 1 after logging the reason."""
    gc.set_threshold(YOUNG_OBJECTS)
    # A terminal sends these to the worker, too, which then stops this process.
    for ignored in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    asyncio.run(_main(socket.socket(fileno=int(sys.argv[1]))))
