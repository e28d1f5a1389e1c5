"""Endings of deliveries, in the form that DONE takes."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.errors import RequestFailed, RequestRejected, WarmqError
from contract.message import Delivery
from contract.results import failure_meta
from contract.traces import read_context

log = logging.getLogger(__name__)

#: Bound of one request's token counts: counters add them up for millions.
MAX_TOKENS = 2**40


@dataclass(slots=True)  # a frozen one takes three times as long to make, once a request
class Ending:
    """One delivery's ending; an empty outcome only drops the lease. `times` is its timing."""

    delivery: Delivery
    outcome: str
    meta: bytes = b""
    keep: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    times: Mapping[str, float | int] = field(default_factory=dict)


def done_arguments(endings: Sequence[Ending]) -> list[Any]:
    """Return DONE's arguments; token counts of remote servers are clamped to MAX_TOKENS."""
    args: list[Any] = []
    for e in endings:
        d, outcome = e.delivery, e.outcome
        if d.ignore_result and outcome and not d.batch:  # a plain client may want no result at all
            outcome = "ignored"
        prompt, completion = e.prompt_tokens, e.completion_tokens
        if not (0 <= prompt <= MAX_TOKENS and 0 <= completion <= MAX_TOKENS):
            prompt, completion = (min(max(0, n), MAX_TOKENS) for n in (prompt, completion))
        life = d.life if d.batch else d.keep_ms or ""
        args += (
            d.lease, d.request_id, d.batch, life, outcome, int(e.keep), prompt, completion, e.meta
        )  # fmt: skip
    return args


def failed(
    delivery: Delivery,
    error: WarmqError,
    outcome: str = "failed",
    timing: dict[str, float | int] | None = None,
) -> Ending:
    """Return the ending of a request without a response."""
    d = delivery
    meta = failure_meta(
        d.request_id, error, batch=d.batch, custom_id=d.custom_id, line=d.line, timing=timing,
        revoked=outcome != "failed",
    )  # fmt: skip
    keep = not isinstance(error, RequestRejected)
    return Ending(d, outcome, meta, keep, times=timing or {})


def with_error(ending: Ending, text: str, code: str) -> Ending:
    """Return the ending with an error in place of its result, and log it."""
    d = ending.delivery
    log.error("request %s: %s", d.request_id, text, extra=log_extra(d, code))
    return failed(d, RequestFailed(text, code=code))


def log_extra(delivery: Delivery, action: str) -> dict[str, str]:
    """Return `extra` for a log line about one request, with its `trace_id` if it is traced."""
    found = {"action": action, "request_id": delivery.request_id, "batch_id": delivery.batch}
    context = read_context(delivery.headers.get("traceparent"))
    return found | ({"trace_id": f"{context.trace_id:032x}"} if context else {})
