"""What happens in a drain, as lines of the log."""

import logging
from functools import partial
from typing import Any

from worker.drain.events import (
    Drained,
    EngineDied,
    EngineReady,
    Event,
    Events,
    LeasesLost,
    RedisBack,
    RedisLost,
    Stopped,
    Stopping,
    Swept,
)

log = logging.getLogger(__name__)

WORK = (EngineReady, EngineDied, LeasesLost, Swept, RedisLost, RedisBack)
END = (Stopping, Drained, Stopped)


def log_events(events: Events, queue: str) -> None:
    """Log from now on what an operator of this queue's worker wants to know."""
    for kind in WORK:
        events.subscribe(kind, partial(_log_work, queue))
    for end in END:
        events.subscribe(end, _log_end)


def _log_work(queue: str, event: Event) -> None:
    match event:
        case EngineReady(seconds, able):
            names = ", ".join((able.model, *able.adapters))
            text = "ready in %.1f s: %s from queue %s, %d requests at once of up to %d tokens"
            limits = able.max_num_seqs, able.max_model_len
            _line(logging.INFO, "engine_ready", text, seconds, names, queue, *limits)
        case EngineDied(reason):
            _line(logging.ERROR, "engine_dead", "engine died: %s", reason)
        case LeasesLost(deliveries):
            count = len(deliveries)
            _line(
                logging.WARNING, "lease_lost", "%d leases were lost, their work is aborted", count
            )
        case Swept(count):
            text = "%d requests of a dead worker go back to the queue"
            _line(logging.WARNING, "swept", text, count)
        case RedisLost(reason):
            _line(logging.WARNING, "redis_lost", "%s; waiting for it", reason)
        case RedisBack(away_s):
            _line(logging.INFO, "redis_back", "Redis is back after %.1f s", away_s)


def _log_end(event: Event) -> None:
    match event:
        case Stopping(in_flight, 0):
            text = "stopping at once: %d requests in flight are handed back"
            _line(logging.INFO, "stopping", text, in_flight)
        case Stopping(in_flight, within_s):
            text = (
                "stopping: %d requests in flight may finish within %g s, the rest is handed back; "
                "Ctrl-C or SIGTERM again hands them back now"
            )
            _line(logging.INFO, "stopping", text, in_flight, within_s)
        case Drained(ended, handed_back):
            text = "drained: %d requests have ended, %d are back in the queue"
            _line(logging.INFO, "drained", text, ended, handed_back)
        case Stopped():
            _line(logging.INFO, "stopped", "stopped")


def _line(level: int, action: str, text: str, *values: Any) -> None:
    log.log(level, text, *values, extra={"action": action})
