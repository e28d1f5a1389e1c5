"""Makes the endings of deliveries, and the arguments of the script DONE.

An ending is how a delivery ended: its outcome, result and token counts. DONE is
worker/lua/done.lua.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from contract.errors import RequestFailed, RequestRejected, WarmqError
from contract.message import Delivery
from contract.results import failure_meta
from contract.traces import read_context

log = logging.getLogger(__name__)

#: Highest token count of one request: the sum over millions of requests must stay below 2**63.
MAX_TOKENS = 2**40


# Each request makes one: a dataclass takes four times as long to make.
class Ending(Struct):
    """How one delivery ended.

    An empty `outcome` only drops the lease. `keep`: the message stays for a retry. `cut`: the
    answer ended at its limit of tokens. `times` is the result's timing. `known` has the digest and
    the body's hash of an answer that may be reused. `characters` is the length of a prompt that is
    only text, `text_tokens` the tokens of this text; both are 0 for any other prompt.
    """

    delivery: Delivery
    outcome: str
    meta: bytes = b""
    keep: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    times: Mapping[str, float | int] = field(default_factory=dict)
    cut: bool = False
    known: tuple[str, int] | None = None
    characters: int = 0
    text_tokens: int = 0


def done_arguments(endings: Sequence[Ending]) -> list[Any]:
    """Return the arguments of DONE; token counts are limited to 0..MAX_TOKENS."""
    args: list[Any] = []
    for ending in endings:
        delivery, outcome = ending.delivery, ending.outcome
        # Celery's ignore_result; a batch needs the result of each of its requests.
        if delivery.ignore_result and outcome and not delivery.batch:
            outcome = "ignored"
        prompt, completion = ending.prompt_tokens, ending.completion_tokens
        if not (0 <= prompt <= MAX_TOKENS and 0 <= completion <= MAX_TOKENS):
            prompt, completion = (min(max(0, n), MAX_TOKENS) for n in (prompt, completion))
        life = delivery.life if delivery.batch else delivery.keep_ms or ""
        flag = "cut" if ending.cut else int(ending.keep)
        args += (
            delivery.lease, delivery.request_id, delivery.batch, life, outcome, flag, prompt,
            completion, ending.meta,
        )  # fmt: skip
    return args


def failed(
    delivery: Delivery,
    error: WarmqError,
    outcome: str = "failed",
    timing: dict[str, float | int] | None = None,
) -> Ending:
    """Return the ending of a request that has an error instead of a response."""
    meta = failure_meta(
        delivery.request_id, error, batch=delivery.batch, custom_id=delivery.custom_id,
        line=delivery.line, timing=timing, revoked=outcome != "failed",
    )  # fmt: skip
    keep = not isinstance(error, RequestRejected)
    return Ending(delivery, outcome, meta, keep, times=timing or {})


def with_error(ending: Ending, text: str, code: str) -> Ending:
    """Return an ending with this error in place of the result, and log the error."""
    delivery = ending.delivery
    log.error("request %s: %s", delivery.request_id, text, extra=log_extra(delivery, code))
    return failed(delivery, RequestFailed(text, code=code))


def log_extra(delivery: Delivery, action: str) -> dict[str, str]:
    """Return `extra` of a log line about one request, with `trace_id` if it has a trace."""
    extra = {"action": action, "request_id": delivery.request_id, "batch_id": delivery.batch}
    context = read_context(delivery.headers.get("traceparent"))
    return extra | ({"trace_id": f"{context.trace_id:032x}"} if context else {})
