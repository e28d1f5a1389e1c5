"""Celery's events: what is sent for `-E` and `celery control enable_events`, as of one worker.

Flower and exporters read them. The drain and further front ends gather (worker/telemetry); here, in
Celery's own thread, they are sent, so that a Redis that is slow holds up no request.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps
from celery.events.dispatcher import EventDispatcher
from celery.worker import state

from contract.naming import TASK_NAME
from worker.process.bootstep import current

log = logging.getLogger(__name__)

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
