"""The truth about this worker, for `celery inspect stats`."""

from typing import Any

from contract.version import version
from worker.drain.announcement import shown
from worker.drain.lifecycle import State
from worker.drain.loop import Drain
from worker.settings import WorkerSettings


def describe(settings: WorkerSettings, drain: Drain | None) -> dict[str, Any]:
    """Return state, capacity and what is in flight; JSON can carry it."""
    if drain is None:
        return {"state": State.STARTING.value}
    capacity = drain.supervisor.capacity
    return {
        "state": drain.lifecycle.state.value,
        "why": shown(drain.supervisor.why, settings),
        "version": version(),
        "queue": settings.queue_to_drain,
        "engine": settings.engine,
        "model": capacity.model if capacity else settings.model,
        "served_model_name": settings.served_model_name,
        "max_num_seqs": capacity.max_num_seqs if capacity else None,
        "max_model_len": capacity.max_model_len if capacity else None,
        "in_flight": len(drain.in_flight),
        "in_flight_limit": drain.room.limit,
        "lease_s": settings.lease_s,
        "engine_deaths": drain.supervisor.deaths,
        "redis_errors": drain.leases.errors,
        "counts": drain.counts.as_json(),
        "details": capacity.details if capacity else {},
    }
