"""The Celery side of a worker: its consumer, its events, its control commands.

No task passes through Celery's consumer: the drain takes requests, and all other lists in Redis,
such as another application's tasks, stay untouched. It serves control commands, and reconnects
quietly; compare celery/worker/consumer/consumer.py of Celery 5.7.

For `-E` and `celery control enable_events` it also sends task events, which Flower and exporters
read. They are gathered by the drain and further front ends (worker/telemetry), and sent in
Celery's own thread, so that a slow Redis delays no request.

`active` and `revoke` are answered for the drain, `stats` in bootstep.py. Commands that need
Celery's own pool or queues are refused with a reason.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from celery import bootsteps
from celery.events.dispatcher import EventDispatcher
from celery.worker import state as celery_state
from celery.worker.consumer import Consumer, connection, consumer
from celery.worker.control import Panel, control_command, inspect_command

from contract.naming import TASK_NAME
from worker.process.bootstep import current
from worker.telemetry.reports import as_task

log = logging.getLogger(__name__)
# kombu logs this each second, with a traceback, while Redis takes no writes.
logging.getLogger("kombu.transport.redis").addFilter(
    lambda record: not str(record.msg).startswith("maybe_refresh_binding_expiry")
)

#: First and longest pause between two connections, in seconds.
FIRST_S, LONGEST_S = 0.25, 2.0
#: A connection that has lasted so long is good.
GOOD_S = 5.0
#: Failed connections in a row before a warning. If Redis is unreachable, the drain warns instead.
WARN_AT = 5


class ControlConsumer(Consumer):
    """Celery's consumer without a queue, and without a log line for each reconnection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Survive what is not a message: Celery would end the process, so that one byte in the
        # control commands' channel could stop every worker.
        self.connection_errors: tuple[Any, ...] = (
            *self.conninfo.connection_errors, ValueError, TypeError, AttributeError, LookupError,
        )  # fmt: skip
        self._restart_state = self
        self._failed, self._warned, self._good_at = 0, False, None

    def loop_args(self) -> Any:
        """Return the arguments of Celery's loop, with a task consumer that consumes no queue."""
        self.task_consumer.consume = lambda *_, **__: None
        return super().loop_args()

    def step(self) -> None:
        """Pause before the next connection; Celery calls this to count its restarts."""
        self._failed += 1
        if self._failed > 1:
            time.sleep(min(LONGEST_S, FIRST_S * 2 ** min(self._failed, 10)))

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        """Note that there is no connection."""
        self._lost(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Drop the connection as Celery does, without its two log lines."""
        connection.logger.disabled = consumer.logger.disabled = True
        try:
            super().on_connection_error_after_connected(exc)
        finally:
            consumer.logger.disabled = False
        self._lost(exc)

    def on_ready(self) -> None:
        """Start to time this connection."""
        super().on_ready()
        self._good_at = self.timer.call_after(GOOD_S, self._good)

    def _lost(self, error: Exception) -> None:
        if self._good_at is not None:
            self._good_at.cancel()
        drain = current().drain
        if self._failed < WARN_AT or self._warned or (drain is not None and drain.outage.ongoing):
            return
        self._warned = True
        log.warning(
            "control commands are not answered: %s; requests are", error,
            extra={"action": "control_lost"},
        )  # fmt: skip

    def _good(self) -> None:
        self._failed, connection.logger.disabled = 0, False
        if self._warned:
            self._warned = False
            log.info("control commands are answered again", extra={"action": "control_back"})


# -- Celery's events -------------------------------------------------------------------

#: Interval between two sends.
EVERY_S = 0.5
#: Most events in one message, of about 300 bytes each.
IN_GROUP = 200


class Dispatcher(EventDispatcher):
    """Celery's dispatcher with the drain's requests in flight as `active` in heartbeats.

    Its groups are larger than Celery's 24 events: an event costs 4 instead of 8 us of CPU.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"buffer_limit": IN_GROUP} | options)

    def send(self, type: str, *args: Any, **fields: Any) -> None:
        """Send an event, or buffer it in its group."""
        if "active" in fields:
            fields["active"] = current().in_flight()
        super().send(type, *args, **fields)


class TaskEventsStep(bootsteps.StartStopStep):
    """Sends the gathered task events twice a second."""

    requires = ("celery.worker.consumer.events:Events",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None

    def start(self, consumer: Any) -> None:
        """Start with each connection of Celery's consumer."""
        self._timer = consumer.timer.call_repeatedly(EVERY_S, self._send, (consumer,))

    def stop(self, consumer: Any) -> None:
        """Stop; the next connection sends the rest."""
        if self._timer is not None:
            consumer.timer.cancel(self._timer)
            self._timer = None

    def _send(self, consumer: Any) -> None:
        step, dispatcher = current(), consumer.event_dispatcher
        ended = step.ended()
        celery_state.all_total_count[0] = celery_state.total_count[TASK_NAME] = ended
        groups = dispatcher.groups
        step.watch(bool(dispatcher.enabled and (not groups or "task" in groups)))
        for event in step.task_events():
            dispatcher.send(event.pop("type"), **event)


# -- Celery's control commands ----------------------------------------------------------

REPLY_S = 5.0


def active(state: Any, **_: Any) -> list[dict[str, Any]]:
    """Return the requests in flight, as Celery lists tasks."""
    step = current()
    if step.drain is None:
        return []
    mine = [as_task(running, os.getpid()) for running in step.drain.in_flight]
    rest = step.run_on_loop(step.front_ends.active(), REPLY_S) or []
    return [{**each, "hostname": state.hostname} for each in (*mine, *rest)]


def revoke(state: Any, task_id: Any, **_: Any) -> dict[str, str]:
    """Cancel requests, running ones immediately, queued ones when a worker takes them.

    Celery's own command would write the result itself, over an existing one, and without counting
    it in its batch.
    """
    ids = [task_id] if isinstance(task_id, str) else list(task_id)
    celery_state.revoked.update(ids)  # for `inspect revoked`
    step = current()
    if step.side_tasks is not None:
        step.front_ends.revoke(ids)
        step.run_on_loop(step.side_tasks.cancels.revoke(ids), REPLY_S)
    return {"ok": f"tasks {ids} flagged as revoked"}


def terminate(state: Any, signal: Any, task_id: Any, **_: Any) -> dict[str, str]:
    """Cancel requests; the signal has no process to go to."""
    return revoke(state, task_id)


def refused(state: Any, *_: Any, **__: Any) -> dict[str, str]:
    """Refuse to consume a queue: Celery's own consumer would fail every task in it."""
    return {
        "error": "warmq workers do not consume Celery's queues: set WARMQ_QUEUE and "
        "WARMQ_SERVED_MODEL_NAME, and restart the worker"
    }


def no_headers(state: Any, *_: Any, **__: Any) -> dict[str, str]:
    """Refuse to revoke by stamped headers: they are not read, so it would cancel nothing."""
    return {"error": "warmq does not read stamped headers: revoke requests by their task ids"}


inspect_command(name="active", alias="dump_active")(active)
control_command(name="revoke", args=[("task_id", str)], variadic="task_id")(revoke)
control_command(name="terminate", args=[("signal", str)], variadic="task_id")(terminate)
Panel.data["dump_active"] = active
Panel.data["add_consumer"] = Panel.data["cancel_consumer"] = refused
Panel.data["revoke_by_stamped_headers"] = no_headers
