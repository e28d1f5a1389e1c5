"""Celery's own consumer as this worker needs it: it serves control commands, and is patient.

No task passes through it. The drain takes requests, and what is in any other list of Redis, such as
another application's tasks, stays there. Named as the app's `worker_consumer` (worker/app.py); read
beside celery/worker/consumer/consumer.py of Celery 5.7.

It also sends Celery's events for `-E` and `celery control enable_events`, as of one worker. Flower
and exporters read them. The drain and further front ends gather (worker/telemetry); here, in
Celery's own thread, they are sent, so that a Redis that is slow holds up no request.
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
#: What kombu logs each second, with a traceback, while Redis takes no writes.
logging.getLogger("kombu.transport.redis").addFilter(
    lambda record: not str(record.msg).startswith("maybe_refresh_binding_expiry")
)

#: Pauses between two connections, in seconds: the first that is made, and the longest.
FIRST_S, LONGEST_S = 0.25, 2.0
#: A connection that has lasted so long is a good one.
GOOD_S = 5.0
#: Connections in a row that fail before it is told. Where Redis is away, the drain tells of it.
TOLD_AT = 5


class ControlConsumer(Consumer):
    """Celery's consumer, which consumes no queue, and connects again in silence."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # It goes on after what is no message; else Celery ends the process, and whoever can write
        # to Redis could stop every worker with one byte in the control commands' channel.
        self.connection_errors: tuple[Any, ...] = (
            *self.conninfo.connection_errors, ValueError, TypeError, AttributeError, LookupError,
        )  # fmt: skip
        self._restart_state = self
        self._failed, self._told, self._good_at = 0, False, None

    def loop_args(self) -> Any:
        """Return what Celery's loop works on: its consumer of tasks shall begin with none."""
        self.task_consumer.consume = lambda *_, **__: None
        return super().loop_args()

    def step(self) -> None:
        """Wait before the next connection, as what Celery counts its restarts with."""
        self._failed += 1
        if self._failed > 1:
            time.sleep(min(LONGEST_S, FIRST_S * 2 ** min(self._failed, 10)))

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        """Note that there is no connection."""
        self._lost(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Let go of the connection as Celery does, which would write two lines each time."""
        connection.logger.disabled = consumer.logger.disabled = True
        try:
            super().on_connection_error_after_connected(exc)
        finally:
            consumer.logger.disabled = False
        self._lost(exc)

    def on_ready(self) -> None:
        """Begin to count the time that this connection lasts."""
        super().on_ready()
        self._good_at = self.timer.call_after(GOOD_S, self._good)

    def _lost(self, error: Exception) -> None:
        if self._good_at is not None:
            self._good_at.cancel()
        drain = current().drain
        if self._failed < TOLD_AT or self._told or (drain is not None and drain.outage.ongoing):
            return
        self._told = True
        log.warning(
            "control commands are not answered: %s; requests are", error,
            extra={"action": "control_lost"},
        )  # fmt: skip

    def _good(self) -> None:
        self._failed, connection.logger.disabled = 0, False
        if self._told:
            self._told = False
            log.info("control commands are answered again", extra={"action": "control_back"})


# -- Celery's events -------------------------------------------------------------------

EVERY_S = 0.5
#: Most events in one message, of about 300 bytes each.
IN_GROUP = 200


class Dispatcher(EventDispatcher):
    """Celery's own; but `active` of the worker's heartbeat counts what the drain has in flight.

    Its groups are larger than Celery's 24 events: an event costs 4 us of CPU then, and not 8.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"buffer_limit": IN_GROUP} | options)

    def send(self, type: str, *args: Any, **fields: Any) -> None:
        """Send an event, or put it into the buffer of its group."""
        if "active" in fields:
            fields["active"] = current().in_flight()
        super().send(type, *args, **fields)


class TaskEventsStep(bootsteps.StartStopStep):
    """Sends what has happened to requests, twice a second, in Celery's buffered form."""

    requires = ("celery.worker.consumer.events:Events",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None

    def start(self, consumer: Any) -> None:
        """Begin, with each connection of Celery's consumer."""
        self._timer = consumer.timer.call_repeatedly(EVERY_S, self._send, (consumer,))

    def stop(self, consumer: Any) -> None:
        """End; what was not sent is sent by the next connection."""
        if self._timer is not None:
            consumer.timer.cancel(self._timer)
            self._timer = None

    def _send(self, consumer: Any) -> None:
        step, dispatcher = current(), consumer.event_dispatcher
        ended = step.ended()
        state.all_total_count[0] = state.total_count[TASK_NAME] = ended
        step.watch(_wanted(dispatcher))
        for told in step.task_events():
            dispatcher.send(told.pop("type"), **told)


def _wanted(dispatcher: Any) -> bool:
    """Say whether somebody has asked for the events of requests."""
    return bool(dispatcher.enabled and (not dispatcher.groups or "task" in dispatcher.groups))
