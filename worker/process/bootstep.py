"""The Celery bootstep that runs the drain in its own thread, with one event loop and engine."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from celery import bootsteps, signals
from celery.utils.nodenames import node_format
from celery.worker import state as celery_state

from contract.errors import StoreUnavailable
from contract.results import OUTCOMES
from contract.settings import SettingsError
from contract.version import version
from worker.drain import heartbeat
from worker.drain.announcement import without_secrets
from worker.drain.drain import Drain
from worker.drain.leases import Leases
from worker.drain.lifecycle import STOP_S, ExitTimer, State
from worker.drain.loop import run_drain
from worker.drain.side_tasks import SideTasks
from worker.engine.catalogue import front_ends_of, load_settings, make_engine
from worker.models.config import models_of
from worker.models.stays import Stays
from worker.process.front_ends import FrontEnds
from worker.process.loop_watch import LoopWatch
from worker.process.machine_report import RecentLines, report_machine
from worker.settings import WorkerSettings
from worker.telemetry.metrics import metrics_page
from worker.telemetry.reports import Report, counts_of, report_of, report_of_part, summed
from worker.telemetry.task_events import TaskEvent, TaskEvents
from worker.telemetry.traces import trace_requests, traces

log = logging.getLogger(__name__)
T = TypeVar("T")

#: The name of the queue that Celery's consumer has, although it takes no messages from it.
CONTROL_QUEUE = "warmq-control"
#: The exit status of a worker whose drain has failed.
EXIT_FATAL = 1
#: New objects after which Python's garbage collector looks at the young ones; some hundred requests
#: make so many. Python's default, 700, took a tenth of the worker's time (docs/decisions/0009).
YOUNG_OBJECTS = 10_000
#: Seconds that the process may take to end after its drain.
LEAVE_S = 20.0

_current: list[EngineStep] = []


def current() -> EngineStep:
    """Return this process's step, for control commands."""
    return _current[0]


class EngineStep(bootsteps.StartStopStep):
    """Runs the drain in its own thread; Celery's consumer only answers control commands."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        if set(worker.app.amqp.queues.consume_from) != {CONTROL_QUEUE}:
            sys.exit(
                "do not use -Q: the drain takes its queue from WARMQ_QUEUE and "
                "WARMQ_SERVED_MODEL_NAME; Celery's own consumer serves control commands only"
            )
        if "solo" not in str(getattr(worker, "pool_cls", "")):
            sys.exit(
                "start the worker with --pool=solo, as `warmq-worker` does: one engine, one process"
            )
        try:
            settings = load_settings().with_engine_log(_log_file(worker))
            heartbeat.write_starting(settings.heartbeat_file)
            self._models = models_of(settings)
            count = 1 if self._models else front_ends_of(settings)
        except SettingsError as error:
            sys.exit(str(error))
        self._name = worker.hostname
        self.worker_id = _worker_id(self._name)
        self.front_ends = FrontEnds(self.worker_id, count)
        self.settings = self.front_ends.settings(settings.model_copy(update={"front_ends": count}))
        self._stays: Stays | None = None
        #: The drains of the models that are loaded together with the model of `drain`.
        self._companions: list[tuple[Drain, SideTasks]] = []
        self.drain: Drain | None = None
        self.side_tasks: SideTasks | None = None
        self._task_events: TaskEvents | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._failed = False
        #: Whether the drain gathers Celery's task events; with `-E` it does from the start.
        self._watched = bool(worker.task_events)
        self._exit_timer = ExitTimer()
        self._loop_watch: LoopWatch | None = None
        _current[:] = [self]

    # -- Celery's side ----------------------------------------------------------

    def start(self, worker: Any) -> None:
        """Start the drain's thread; do not wait for the engine, so that `inspect ping` works."""
        gc.set_threshold(YOUNG_OBJECTS)
        signals.worker_shutting_down.connect(self._on_signal, weak=False)
        self._thread = threading.Thread(target=self._main, args=(worker,), name="drain")
        self._thread.start()
        self._begun.wait()

    def stop(self, worker: Any) -> None:
        """Stop the drain and wait for its thread; a second signal hands requests back now."""
        if self._thread is not None:
            self._call("stop")
            self._thread.join()
            if self._failed:  # Celery has set the exit status to 0 at the signal
                worker.exitcode = EXIT_FATAL

    def terminate(self, worker: Any) -> None:
        """Hand all requests back immediately."""
        self._call("hurry")
        self.stop(worker)

    def info(self, worker: Any) -> dict[str, Any]:
        """Return warmq's part of the answer to `celery inspect stats`."""
        return {"warmq": self._stats()}

    def _on_signal(self, how: str = "", **_: Any) -> None:
        self._call("hurry" if how == "Cold" else "stop")

    def run_on_loop(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T | None:
        """Run a coroutine on the drain's loop; return None if the loop has not started."""
        if self._loop is None:
            work.close()
            return None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def drains(self) -> list[tuple[Drain, SideTasks]]:
        """Return this process's drains and their side tasks; one for each loaded model."""
        if self.drain is None or self.side_tasks is None:
            return []
        return [(self.drain, self.side_tasks), *self._companions]

    def in_flight(self) -> int:
        """Return the number of requests in flight in all front ends."""
        mine = len(self.drain.in_flight) if self.drain else 0
        return mine + summed(self._reports(), "in_flight")

    def ended(self) -> int:
        """Return how many requests have ended in this worker since it started."""
        counted = [each["counts"] for each in self._reports()]
        if self.drain is not None:
            counted += [each.as_json() for each in (self.drain.counts, *self.drain.earlier)]
        return sum(summed(counted, outcome) for outcome in OUTCOMES)

    def watch(self, on: bool) -> None:
        """Make all front ends gather Celery's task events, or stop that; any thread may call."""
        if on == self._watched or self._loop is None or self._loop.is_closed():
            return
        self._watched = on
        if self._task_events is not None:
            self._loop.call_soon_threadsafe(self._task_events.switch, on)
            self._loop.call_soon_threadsafe(self.front_ends.watch, on)

    def task_events(self) -> list[TaskEvent]:
        """Return the task events since the last call; any thread may call this."""
        mine = self._task_events.take() if self._task_events else []
        return mine + self.front_ends.task_events()

    def _call(self, name: str) -> None:
        """Call `stop` or `hurry` of the drain, and limit the time until the process ends."""
        if self._loop is None or self.drain is None:
            return
        if self._stays is not None:
            self._stays.stop()
        if self._loop_watch is not None:
            self._loop_watch.note_stop()
        finish_s = self.settings.drain_timeout_s if name == "stop" else 0.0
        self._exit_timer.within(finish_s + self.drain.supervisor.grace_s + STOP_S)
        if not self._loop.is_closed():
            for drain in (self.drain, *(one for one, _ in self._companions)):
                self._loop.call_soon_threadsafe(getattr(drain, name))

    def _stats(self) -> dict[str, Any]:
        """Return state, capacity and requests in flight of all front ends, as JSON values."""
        drain, settings, front_ends = self.drain, self.settings, self.front_ends
        if drain is None:
            return {"state": State.STARTING.value}
        capacity = drain.supervisor.capacity
        reports = [report_of(drain), *self._reports()]
        return {
            "state": drain.lifecycle.state.value,
            "why": without_secrets(drain.supervisor.why, settings),
            "version": version(),
            "queue": settings.queue_to_drain,
            "engine": settings.engine,
            "model": capacity.model if capacity else settings.model,
            "served_model_name": settings.served_model_name,
            "max_num_seqs": front_ends.max_num_seqs,
            "front_ends": front_ends.count,
            "max_model_len": capacity.max_model_len if capacity else None,
            "in_flight": summed(reports, "in_flight"),
            "in_flight_limit": summed(reports, "limit"),
            "lease_s": settings.lease_s,
            "engine_deaths": drain.supervisor.deaths,
            "redis_errors": summed(reports, "redis_errors"),
            "counts": counts_of(reports),
            "details": capacity.details if capacity else {},
        }

    # -- the drain's thread -----------------------------------------------------

    def _main(self, worker: Any) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # a process without a drain must end
            self._failed = True
            _log_fatal(error, self.settings.see_engine_log)
            self._leave(worker)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            with traces(self.settings):
                if self._models:
                    self._stays = Stays(
                        self._models, self.worker_id, self._run_drain, self._run_companion
                    )
                    await self._stays.run()
                else:
                    await self._run_drain(self.settings)
        finally:
            self._exit_timer.within(LEAVE_S)  # a task or thread that hangs may keep the loop alive

    async def _run_drain(
        self, settings: WorkerSettings, begin: Callable[[Drain], None] = lambda _: None
    ) -> None:
        """Run one drain until it has stopped; call `begin` with the drain before its start."""
        if self.drain is not None:  # the drain of another model has ended
            self.front_ends = FrontEnds(self.worker_id, 1)
        self.settings = settings
        leases = Leases(settings, self.worker_id)
        self.drain = drain = Drain(settings, leases, lambda: make_engine(settings))
        drain.supervisor.peers = self.front_ends
        self.front_ends.subscribe(drain.events)
        self._task_events = TaskEvents(drain.events)
        self._task_events.switch(self._watched)
        self.front_ends.watch(self._watched)
        self.side_tasks = SideTasks(drain)
        trace_requests(drain)
        begin(drain)
        self._begun.set()
        try:
            with (
                LoopWatch(drain) as self._loop_watch,
                metrics_page(drain, self._reports),
                RecentLines() as recent,
            ):
                tasks = [*self.side_tasks.tasks(), report_machine(drain, recent)]
                await run_drain(drain, [*tasks, self.front_ends.run()])
        finally:
            await leases.close()

    async def _run_companion(
        self, settings: WorkerSettings, begin: Callable[[Drain], None]
    ) -> None:
        """Run the drain of a model that is loaded together with another one, as `_run_drain` does.

        This drain has a worker id of its own in Redis, but the worker reports its numbers.
        """
        unset = {"heartbeat_file": None, "metrics_port": None}
        settings = settings.model_copy(update=unset)
        leases = Leases(settings, _worker_id(self._name))
        drain = Drain(settings, leases, lambda: make_engine(settings))
        trace_requests(drain)
        begin(drain)
        side_tasks = SideTasks(drain)
        companion = drain, side_tasks
        self._companions.append(companion)
        try:
            await run_drain(drain, side_tasks.tasks())
        finally:
            self._companions.remove(companion)
            await leases.close()

    def _reports(self) -> list[Report]:
        """Return the reports of further front ends, and of models loaded with the main one."""
        companions = [report_of_part(drain) for drain, _ in list(self._companions)]
        return [*self.front_ends.reports(), *companions]

    def _leave(self, worker: Any) -> None:
        """Make the process exit with EXIT_FATAL, through Celery's loop if that already runs."""
        self._begun.set()
        if self.drain is not None:
            self.drain.lifecycle.stopped()
        celery_state.should_stop = EXIT_FATAL
        self._exit_timer.within(LEAVE_S)
        try:
            worker.consumer.call_soon(lambda: None)  # wakes Celery's loop, which reads should_stop
        except AttributeError:  # Celery's loop does not run yet
            os.kill(os.getpid(), signal.SIGTERM)


def _worker_id(name: str) -> str:
    return f"{name}.{os.getpid()}.{uuid.uuid4().hex[:8]}"


def _log_file(worker: Any) -> str | None:
    """Return the path of Celery's --logfile; None for stderr."""
    file = getattr(worker, "logfile", None)
    return node_format(file, worker.hostname) if isinstance(file, str) and file else None


def _log_fatal(error: BaseException, see_engine_log: str) -> None:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            _log_fatal(inner, see_engine_log)
        return
    # These two errors' messages are complete; any other error needs its traceback.
    trace = None if isinstance(error, SettingsError | StoreUnavailable) else error
    text = "the drain ended: %s%s"
    log.critical(text, error, see_engine_log, exc_info=trace, extra={"action": "fatal"})
