"""What happens in a drain, as lines of the log."""

import logging
from typing import Any

from worker.drain.events import (
    EngineDied,
    EngineReady,
    Event,
    Events,
    LeasesLost,
    RedisBack,
    RedisLost,
    Swept,
)

log = logging.getLogger(__name__)


def log_events(events: Events) -> None:
    """Log from now on what an operator wants to know."""
    for kind in (EngineReady, EngineDied, LeasesLost, Swept, RedisLost, RedisBack):
        events.subscribe(kind, _log)


def _log(event: Event) -> None:
    match event:
        case EngineReady(seconds, capacity):
            _line(logging.INFO, "engine_ready", "engine ready in %.1f s: %s", seconds, capacity)
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


def _line(level: int, action: str, text: str, *values: Any) -> None:
    log.log(level, text, *values, extra={"action": action})
