"""What `submit` takes besides the requests."""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from contract.naming import DEFAULT_TENANT, queue_name
from contract.settings import Settings
from producer.input.options import BadOption, check_sources
from producer.submit.submission import Submission, Wish

Deadline = dt.timedelta | dt.datetime


class SubmitOptions(TypedDict, total=False):
    """Options of `submit`; all may be left out.

    columns: of rows that are no requests as they stand: the column, or the template over columns,
        that each field gets, as `{"prompt": "text"}` or `{"messages.user": "Translate: {text}"}`.
    batch_id: name of the batch; the same one resumes it. By default a new one.
    model: served model to send the requests to; '' for workers without a name.
    fields: body fields that every request gets, as `{"max_tokens": 256}`.
    priority: 0 (most urgent) to 9, in steps of 3; 6 by default.
    tenant: whose requests these are.
    turn: `fair` shares with the tenant's other batches, `fifo` waits for them.
    deadline: when unfinished requests expire: after the batch's creation, or at a time.
    once: run requests with the same body once, where temperature is 0.
    order: `prefix` queues requests with a common beginning together, `auto` where that saves
        something; neither is possible for what can be iterated only once.
    """

    columns: Mapping[str, str]
    batch_id: str | None
    model: str
    fields: Mapping[str, Any]
    priority: int
    tenant: str
    turn: Literal["fair", "fifo"]
    deadline: Deadline | None
    once: bool
    order: Wish


def submission_of(options: SubmitOptions, settings: Settings) -> Submission:
    """Return what the options ask for.

    Raises:
        BadOption: naming the one that is wrong.
    """
    if unknown := sorted(options.keys() - SubmitOptions.__annotations__.keys()):
        known = ", ".join(SubmitOptions.__annotations__)
        raise BadOption(f"{unknown[0]} is no option of submit; there are {known}")
    model, turn = options.get("model", ""), options.get("turn", "fair")
    order: Wish = options.get("order", "input")
    for name, value, among in (
        ("turn", turn, ("fair", "fifo")),
        ("order", order, ("input", "prefix", "auto")),
        ("priority", options.get("priority", 6), range(10)),
    ):
        if value not in among:
            raise BadOption(f"{name} {value!r}: give one of {', '.join(map(str, among))}")
    check_sources(options.get("fields", {}), options.get("columns", {}), ("fields", "columns"))
    submission = Submission(
        options.get("batch_id")
        or f"batch_{dt.datetime.now(dt.UTC):%Y%m%d%H%M%S}_{secrets.token_hex(8)}",
        queue_name(model or None, settings.queue),
        options.get("priority", 6),
        model,
        dict(options.get("fields", {})),
        _deadline(options.get("deadline")),
        tenant=options.get("tenant", DEFAULT_TENANT),
        in_order=turn == "fifo",
        once=options.get("once", False),
        order=order,
    )
    submission.check()
    return submission


def _deadline(deadline: Deadline | None) -> str:
    """Return a deadline as CREATE takes it."""
    if deadline is None:
        return ""
    if isinstance(deadline, dt.timedelta):
        if deadline <= dt.timedelta():
            raise BadOption(f"deadline {deadline}: give a duration above 0")
        return f"+{round(deadline.total_seconds() * 1000)}"
    if deadline.tzinfo is None:
        raise BadOption(f"deadline {deadline}: the time zone is missing; give one, as dt.UTC")
    return str(round(deadline.timestamp() * 1000))
