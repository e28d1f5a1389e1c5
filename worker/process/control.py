"""Celery's control commands, answered for the drain: active and revoke (stats: bootstep.py).

Commands that need Celery's own pool or queues are refused with a reason.
"""

import os
from typing import Any

from celery.worker.control import Panel, control_command, inspect_command
from celery.worker.state import revoked

from worker.process.bootstep import current
from worker.telemetry.reports import as_task

REPLY_S = 5.0


def active(state: Any, **_: Any) -> list[dict[str, Any]]:
    """Return the requests in flight, as Celery lists tasks."""
    step = current()
    if step.drain is None:
        return []
    mine = [as_task(running, os.getpid()) for running in step.drain.in_flight]
    rest = step.run_on_loop(step.front_ends.active(), REPLY_S) or []
    return [{**each, "hostname": state.hostname} for each in (*mine, *rest)]


def revoke(state: Any, task_id: Any, **_: Any) -> dict[str, str]:
    """Cancel requests, running ones immediately, queued ones when a worker takes them.

    Celery's own command would write the result itself, over an existing one, and without counting
    it in its batch.
    """
    ids = [task_id] if isinstance(task_id, str) else list(task_id)
    revoked.update(ids)  # for `inspect revoked`
    step = current()
    if step.side_tasks is not None:
        step.front_ends.revoke(ids)
        step.run_on_loop(step.side_tasks.cancels.revoke(ids), REPLY_S)
    return {"ok": f"tasks {ids} flagged as revoked"}


def terminate(state: Any, signal: Any, task_id: Any, **_: Any) -> dict[str, str]:
    """Cancel requests; the signal has no process to go to."""
    return revoke(state, task_id)


def refused(state: Any, *_: Any, **__: Any) -> dict[str, str]:
    """Refuse to consume a queue: Celery's own consumer would fail every task in it."""
    return {
        "error": "warmq workers do not consume Celery's queues: set WARMQ_QUEUE and "
        "WARMQ_SERVED_MODEL_NAME, and restart the worker"
    }


def no_headers(state: Any, *_: Any, **__: Any) -> dict[str, str]:
    """Refuse to revoke by stamped headers: they are not read, so it would cancel nothing."""
    return {"error": "warmq does not read stamped headers: revoke requests by their task ids"}


inspect_command(name="active", alias="dump_active")(active)
control_command(name="revoke", args=[("task_id", str)], variadic="task_id")(revoke)
control_command(name="terminate", args=[("signal", str)], variadic="task_id")(terminate)
Panel.data["dump_active"] = active
Panel.data["add_consumer"] = Panel.data["cancel_consumer"] = refused
Panel.data["revoke_by_stamped_headers"] = no_headers
