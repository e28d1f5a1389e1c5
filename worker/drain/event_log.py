"""Writes log lines about a drain's events."""

import logging
from typing import NamedTuple

from worker.drain import events
from worker.drain.events import Event, Events

log = logging.getLogger(__name__)


class Line(NamedTuple):
    """The log line for one type of event; the event's fields are the values of `text`."""

    level: int
    action: str
    text: str


LINES: dict[type[Event], Line] = {
    events.Swept: Line(
        logging.WARNING, "swept", "%d requests of a dead worker go back to the queue"
    ),
    events.RedisLost: Line(logging.WARNING, "redis_lost", "%s; waiting for it"),
    events.RedisBack: Line(logging.INFO, "redis_back", "Redis is back after %.1f s"),
    events.Drained: Line(
        logging.INFO, "drained", "drained: %d requests have ended, %d are back in the queue"
    ),
    events.Stopped: Line(logging.INFO, "stopped", "stopped"),
}


def log_events(published: Events, queue: str, see_engine_log: str) -> None:
    """Log the events that an operator wants to know, from now on."""

    def died(event: events.EngineDied) -> None:
        text = "engine died: %s%s"
        log.error(text, *event, see_engine_log, extra={"action": "engine_dead"})

    def ready(event: events.EngineReady) -> None:
        capacity = event.capacity
        log.info(
            "ready in %.1f s: %s from queue %s, %d requests at once of up to %d tokens",
            event.seconds, ", ".join((capacity.model, *capacity.adapters)), queue,
            capacity.max_num_seqs, capacity.max_model_len, extra={"action": "engine_ready"},
        )  # fmt: skip

    for event_type in LINES:
        published.subscribe(event_type, _log)
    published.subscribe(events.EngineReady, ready)
    published.subscribe(events.EngineDied, died)
    published.subscribe(events.LeasesLost, _log_lost)
    published.subscribe(events.Stopping, _log_stopping)


def _log(event: Event) -> None:
    level, action, text = LINES[type(event)]
    log.log(level, text, *event, extra={"action": action})


def _log_lost(event: events.LeasesLost) -> None:
    text = "%d leases were lost, their work is aborted"
    log.warning(text, len(event.deliveries), extra={"action": "lease_lost"})


def _log_stopping(event: events.Stopping) -> None:
    text = "stopping now: %d requests in flight are handed back"
    if event.within_s:
        text = (
            "stopping: %d requests in flight may finish within %g s, the rest is handed back; "
            "Ctrl-C or SIGTERM again hands them back now"
        )
    values = event if event.within_s else event[:1]
    log.info(text, *values, extra={"action": "stopping"})
