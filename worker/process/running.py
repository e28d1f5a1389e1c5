"""A request in flight, as `celery inspect active` shows it."""

from typing import Any

from contract.naming import TASK_NAME
from worker.drain.in_flight import Running


def shown(running: Running, process: int) -> dict[str, Any]:
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
