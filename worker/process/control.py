"""Celery's control commands, answered for the drain: active and revoke (stats: bootstep).

Those that only Celery's own pool and queues could obey are refused in words.
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
    others = step.run_on_loop(step.front_ends.active(), REPLY_S) or []
    return [{**each, "hostname": state.hostname} for each in (*mine, *others)]


def revoke(state: Any, task_id: Any, **_: Any) -> dict[str, str]:
    """Cancel requests wherever they are: queued ones when they are met, running ones now.

    Celery's own command would write the result itself: over one that is there, and
    without counting it in its batch.
    """
    ids = [task_id] if isinstance(task_id, str) else list(task_id)
    revoked.update(ids)  # what `inspect revoked` shows
    step = current()
    if step.side_tasks is not None:
        step.front_ends.revoke(ids)
        step.run_on_loop(step.side_tasks.cancels.revoke(ids), REPLY_S)
    return {"ok": f"tasks {ids} flagged as revoked"}


def terminate(state: Any, signal: Any, task_id: Any, **_: Any) -> dict[str, str]:
    """Cancel requests; there is no process of theirs that could get a signal."""
    return revoke(state, task_id)


def refused(state: Any, *_: Any, **__: Any) -> dict[str, str]:
    """Refuse to read a queue that Celery's own consumer would fail every task of."""
    return {
        "error": "warmq reads no queue of Celery's: a worker takes the requests of its own queue, "
        "which WARMQ_QUEUE and WARMQ_SERVED_MODEL_NAME name, from its start to its end"
    }


def no_headers(state: Any, *_: Any, **__: Any) -> dict[str, str]:
    """Refuse what would cancel nothing: stamps are not looked at."""
    return {"error": "warmq does not look at stamped headers: revoke requests by their task ids"}


def install() -> None:
    """Put our answers in the place of Celery's, which only know its own pool."""
    inspect_command(name="active", alias="dump_active")(active)
    control_command(name="revoke", args=[("task_id", str)], variadic="task_id")(revoke)
    control_command(name="terminate", args=[("signal", str)], variadic="task_id")(terminate)
    Panel.data["dump_active"] = active
    for name in ("add_consumer", "cancel_consumer"):
        Panel.data[name] = refused
    Panel.data["revoke_by_stamped_headers"] = no_headers


install()
