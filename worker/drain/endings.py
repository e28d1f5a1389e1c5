"""How deliveries end, as DONE is told."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.errors import RequestFailed
from contract.message import Delivery
from contract.results import failure_meta
from contract.traces import read_context

log = logging.getLogger(__name__)

#: More tokens than any request has: counters add them up for millions.
MOST_TOKENS = 2**40


@dataclass(slots=True)  # a frozen one takes three times as long to make, once a request
class Ending:
    """How one delivery ended; an empty outcome only drops the lease. Never changed.

    `times` is the result's `warmq.timing`; empty for what was never given to an engine.
    """

    delivery: Delivery
    outcome: str
    meta: bytes = b""
    keep: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    times: Mapping[str, float | int] = field(default_factory=dict)


def arguments(endings: Sequence[Ending]) -> list[Any]:
    """Return DONE's arguments for these endings.

    Token counts are numbers that Redis can add up, whatever a remote server says it has used.
    """
    args: list[Any] = []
    for e in endings:
        d, outcome = e.delivery, e.outcome
        if d.ignore_result and outcome and not d.batch:  # a plain client may want no result at all
            outcome = "ignored"
        prompt, completion = e.prompt_tokens, e.completion_tokens
        if not (0 <= prompt <= MOST_TOKENS and 0 <= completion <= MOST_TOKENS):
            prompt, completion = (min(max(0, n), MOST_TOKENS) for n in (prompt, completion))
        life = d.life if d.batch else d.keep_ms or ""
        args += (
            d.lease, d.request_id, d.batch, life, outcome, int(e.keep), prompt, completion, e.meta
        )  # fmt: skip
    return args


def with_error(ending: Ending, text: str, code: str) -> Ending:
    """Return the same delivery's ending with an error in the place of its result."""
    d = ending.delivery
    log.error("request %s: %s", d.request_id, text, extra=about(d, code))
    error = RequestFailed(text, code=code)
    meta = failure_meta(d.request_id, error, batch=d.batch, custom_id=d.custom_id, line=d.line)
    return Ending(d, "failed", meta, keep=True)


def about(delivery: Delivery, action: str) -> dict[str, str]:
    """Return `extra` for a line of the log about one request.

    It has a `trace_id` where the message's sender has begun a trace.
    """
    found = {"action": action, "request_id": delivery.request_id, "batch_id": delivery.batch}
    headers = delivery.headers
    context = read_context(headers.get("traceparent"))
    return found | ({"trace_id": f"{context.trace_id:032x}"} if context else {})
