"""Celery's own consumer, changed: it serves control commands only, and reconnects quietly.

No task passes through it: the drain takes requests, and all other lists in Redis, such as another
application's tasks, stay untouched. Set as the app's `worker_consumer` (worker/app.py); compare
celery/worker/consumer/consumer.py of Celery 5.7.

For `-E` and `celery control enable_events` it also sends task events, which Flower and exporters
read. They are gathered by the drain and further front ends (worker/telemetry), and sent in
Celery's own thread, so that a slow Redis delays no request.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from celery import bootsteps
from celery.events.dispatcher import EventDispatcher
from celery.worker import state
from celery.worker.consumer import Consumer, connection, consumer

from contract.naming import TASK_NAME
from worker.process.bootstep import current

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
        state.all_total_count[0] = state.total_count[TASK_NAME] = ended
        groups = dispatcher.groups
        step.watch(bool(dispatcher.enabled and (not groups or "task" in groups)))
        for event in step.task_events():
            dispatcher.send(event.pop("type"), **event)
