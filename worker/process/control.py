"""Changes Celery's consumer, events and control commands for a worker whose drain takes requests.

No task passes through Celery's consumer: the drain takes requests from their lists in Redis, and
lists of other applications' tasks stay unread. The consumer answers control commands, and
reconnects with fewer log lines than in celery/worker/consumer/consumer.py of Celery 5.7.

With `-E`, or after `celery control enable_events`, the consumer also sends task events, which
Flower and exporters read. The drain and further front ends gather the events (worker/telemetry).
Celery's thread sends them, so that a slow Redis does not delay requests.

`active` and `revoke` work on the drain's requests; bootstep.py answers `stats`. Commands that need
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
# While Redis takes no writes, kombu logs a line with this beginning each second, with a traceback.
logging.getLogger("kombu.transport.redis").addFilter(
    lambda record: not str(record.msg).startswith("maybe_refresh_binding_expiry")
)

#: Seconds of a pause between two attempts to connect: PAUSE_S, doubled with each failed connection,
#: and at most LONGEST_PAUSE_S.
PAUSE_S, LONGEST_PAUSE_S = 0.25, 2.0
#: Seconds that a connection must last; then the number of failed connections is 0 again.
GOOD_S = 5.0
#: Failed connections in a row before a warning; during an outage of Redis the drain logs instead.
WARN_AT = 5


class ControlConsumer(Consumer):
    """Celery's consumer, which here consumes no queue and does not log each reconnection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # These errors are raised for data that is not a message. Celery would end the process: one
        # byte in the channel of the control commands could stop every worker.
        self.connection_errors: tuple[Any, ...] = (
            *self.conninfo.connection_errors, ValueError, TypeError, AttributeError, LookupError,
        )  # fmt: skip
        self._restart_state = self
        self._failed, self._warned, self._good_at = 0, False, None

    def loop_args(self) -> Any:
        """Return the arguments of Celery's loop; its task consumer consumes no queue."""
        self.task_consumer.consume = lambda *_, **__: None
        return super().loop_args()

    def step(self) -> None:
        """Pause before the next connection; Celery calls this to count restarts."""
        self._failed += 1
        if self._failed > 1:
            time.sleep(min(LONGEST_PAUSE_S, PAUSE_S * 2 ** min(self._failed, 10)))

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        """Note that no connection could be made."""
        self._note_lost(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Drop the connection as Celery does, without its two log lines."""
        # The logger of `connection` stays off until a connection has lasted (_note_good).
        connection.logger.disabled = consumer.logger.disabled = True
        try:
            super().on_connection_error_after_connected(exc)
        finally:
            consumer.logger.disabled = False
        self._note_lost(exc)

    def on_ready(self) -> None:
        """Begin to count GOOD_S for this connection."""
        super().on_ready()
        self._good_at = self.timer.call_after(GOOD_S, self._note_good)

    def _note_lost(self, error: Exception) -> None:
        if self._good_at is not None:
            self._good_at.cancel()
        drain = current().drain
        if self._failed < WARN_AT or self._warned or (drain is not None and drain.outage.ongoing):
            return
        self._warned = True
        log.warning(
            "control commands are not answered (%s); requests still run", error,
            extra={"action": "control_lost"},
        )  # fmt: skip

    def _note_good(self) -> None:
        self._failed, connection.logger.disabled = 0, False
        if self._warned:
            self._warned = False
            log.info("control commands are answered again", extra={"action": "control_back"})


# -- Celery's events -------------------------------------------------------------------

#: Seconds between two sends of task events.
EVERY_S = 0.5
#: Most events in one message; an event has about 300 bytes.
IN_GROUP = 200


class Dispatcher(EventDispatcher):
    """Celery's event dispatcher, whose heartbeats have the requests in flight as `active`.

    One message has up to IN_GROUP events, where Celery's has 24: an event then costs 4 us of CPU
    time instead of 8.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"buffer_limit": IN_GROUP} | options)

    def send(self, type: str, *args: Any, **fields: Any) -> None:
        """Send an event, or buffer it for the next message."""
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
        """Start the timer, after each connection of Celery's consumer."""
        self._timer = consumer.timer.call_repeatedly(EVERY_S, self._send, (consumer,))

    def stop(self, consumer: Any) -> None:
        """Stop the timer; remaining events are sent over the next connection."""
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

#: Seconds that a control command waits for the drain's loop.
REPLY_S = 5.0


def active(state: Any, **_: Any) -> list[dict[str, Any]]:
    """Return the requests in flight of all front ends, as Celery lists tasks."""
    step = current()
    if step.drain is None:
        return []
    mine = [as_task(one, os.getpid()) for drain, _ in step.drains() for one in drain.in_flight]
    rest = step.run_on_loop(step.front_ends.active(), REPLY_S) or []
    return [{**each, "hostname": state.hostname} for each in (*mine, *rest)]


def revoke(state: Any, task_id: Any, **_: Any) -> dict[str, str]:
    """Cancel requests: running ones immediately, queued ones when a worker takes them.

    Celery's own command would write a result over an existing one, and would not count it in the
    batch.
    """
    ids = [task_id] if isinstance(task_id, str) else list(task_id)
    celery_state.revoked.update(ids)  # `inspect revoked` lists them
    step = current()
    if drains := step.drains():
        step.front_ends.revoke(ids)
        for _drain, side_tasks in drains:
            step.run_on_loop(side_tasks.cancels.revoke(ids), REPLY_S)
    return {"ok": f"tasks {ids} flagged as revoked"}


def terminate(state: Any, signal: Any, task_id: Any, **_: Any) -> dict[str, str]:
    """Cancel requests; the signal is ignored, as requests have no processes."""
    return revoke(state, task_id)


def refuse_queue(state: Any, *_: Any, **__: Any) -> dict[str, str]:
    """Refuse to consume a queue, because Celery's consumer would fail every task in it."""
    return {
        "error": "warmq workers do not consume Celery's queues: set WARMQ_QUEUE and "
        "WARMQ_SERVED_MODEL_NAME, and restart the worker"
    }


def refuse_headers(state: Any, *_: Any, **__: Any) -> dict[str, str]:
    """Refuse to revoke by stamped headers: warmq ignores them, so nothing would be cancelled."""
    return {"error": "warmq does not read stamped headers: revoke requests by their task ids"}


inspect_command(name="active", alias="dump_active")(active)
control_command(name="revoke", args=[("task_id", str)], variadic="task_id")(revoke)
control_command(name="terminate", args=[("signal", str)], variadic="task_id")(terminate)
Panel.data["dump_active"] = active
Panel.data["add_consumer"] = Panel.data["cancel_consumer"] = refuse_queue
Panel.data["revoke_by_stamped_headers"] = refuse_headers
