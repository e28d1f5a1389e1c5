"""The truth about this worker, for `celery inspect stats` and `celery inspect active`."""

from typing import Any

from contract.naming import TASK_NAME
from contract.redis.scripts import script_errors
from contract.version import version
from worker.drain.announcement import shown
from worker.drain.drain import Drain
from worker.drain.in_flight import Running
from worker.drain.lifecycle import State
from worker.process.front_ends import FrontEnds
from worker.settings import WorkerSettings


def describe(
    settings: WorkerSettings, drain: Drain | None, front_ends: FrontEnds
) -> dict[str, Any]:
    """Return state, capacity and what is in flight of all front ends; JSON can carry it."""
    if drain is None:
        return {"state": State.STARTING.value}
    capacity, others = drain.supervisor.capacity, front_ends.reports()
    counts = drain.counts.as_json()
    return {
        "state": drain.lifecycle.state.value,
        "why": shown(drain.supervisor.why, settings),
        "version": version(),
        "queue": settings.queue_to_drain,
        "engine": settings.engine,
        "model": capacity.model if capacity else settings.model,
        "served_model_name": settings.served_model_name,
        "max_num_seqs": front_ends.max_num_seqs,
        "front_ends": front_ends.count,
        "max_model_len": capacity.max_model_len if capacity else None,
        "in_flight": len(drain.in_flight) + sum(each["in_flight"] for each in others),
        "in_flight_limit": drain.room.limit + sum(each["limit"] for each in others),
        "lease_s": settings.lease_s,
        "engine_deaths": drain.supervisor.deaths,
        "redis_errors": script_errors() + sum(each["redis_errors"] for each in others),
        "counts": {
            name: count + sum(each["counts"][name] for each in others)
            for name, count in counts.items()
        },
        "details": capacity.details if capacity else {},
    }


def as_task(running: Running, process: int) -> dict[str, Any]:
    """Return it as Celery lists tasks; the command adds the worker's name."""
    delivery = running.delivery
    return {
        "id": delivery.request_id,
        "name": TASK_NAME,
        "worker_pid": process,
        "batch": delivery.batch or None,
        "custom_id": delivery.custom_id,
        "attempt": delivery.attempt,
    }
