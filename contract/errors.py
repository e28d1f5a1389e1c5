"""Errors by who must act, and the stable codes users see in error lines."""

from __future__ import annotations

from typing import Literal

#: What the user can do about an error, for each user interface to word in its own terms.
Remedy = Literal[
    "collect_earlier", "follow_results", "name_error_file", "new_batch_id", "read_new_batch",
    "report", "resume_submit", "same_options", "submit_again", "submit_from_start",
]  # fmt: skip


class WarmqError(Exception):
    """Base of every error warmq raises on purpose.

    `message` says what is wrong. What to do about it is in the message too, or `remedy` is set:
    then the user interface words it, with the `facts` that it names.
    """

    code = "internal_error"

    def __init__(
        self, message: str, *, code: str | None = None, remedy: Remedy | None = None, **facts: str
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.remedy = remedy
        self.facts = facts


class RequestRejected(WarmqError):
    """The request itself is wrong: its author must change it. Never retried."""

    code = "invalid_request"

    def __init__(
        self, message: str, *, code: str | None = None, field: str | None = None,
        custom_id: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message, code=code)
        self.field = field
        #: The request's own custom_id, where the line had a usable one.
        self.custom_id = custom_id


class RequestFailed(WarmqError):
    """This attempt failed while the engine lives: a retry may help."""

    code = "request_failed"


class EngineDead(WarmqError):
    """The engine cannot run anything: the worker rebuilds it or exits.

    `inside` says whether the request was inside the engine when it died, so that it
    may have been the cause; one that met a dead engine cannot have been.
    """

    code = "engine_dead"

    def __init__(self, message: str, *, inside: bool = True) -> None:
        super().__init__(message)
        self.inside = inside


class StoreUnavailable(WarmqError):
    """Redis cannot be reached or refuses: the operator must act, results are kept."""

    code = "store_unavailable"


class StoreUnreachable(StoreUnavailable):
    """There is no connection to Redis, or it broke: what was sent may have been done."""


class StoreFull(StoreUnavailable):
    """Redis has no memory for this write: it fits once results are collected."""


class StoreRefused(StoreUnavailable):
    """Redis refuses this write whenever it is sent: sending it again does not help."""

    code = "result_refused"


class BatchConflict(WarmqError):
    """The batch exists in a state that forbids what was asked."""

    code = "batch_conflict"


#: Every code an error line or a Celery failure may carry, with what it means.
CODES: dict[str, str] = {
    "invalid_json": "the line is not JSON, or not UTF-8",
    "invalid_request": "a field is missing, of the wrong type or out of range",
    "unknown_field": "a field name that no vLLM request has",
    "unknown_url": "`url` or `method` names no endpoint that warmq serves",
    "duplicate_custom_id": "the custom_id was used by an earlier line of the batch",
    "line_too_long": "the line is larger than WARMQ_MAX_LINE_BYTES",
    "model_not_found": "the line names a model that this worker does not serve",
    "context_length_exceeded": "the prompt does not fit into the model's context",
    "unsupported_option": "a Celery option that warmq does not honour (eta, chord, ...)",
    "unknown_task": "a task name other than warmq.generate on warmq's queue",
    "request_failed": "the engine failed on this request; it may be retried",
    "result_too_large": "the result is larger than Redis takes (proto-max-bulk-len)",
    "result_refused": "Redis refused the result for a reason that will not pass",
    "poison": "the engine died each time it ran this request; its message is a dead letter",
    "cancelled": "cancelled by the user",
    "expired": "not finished before its deadline",
    "result_expired": "the result was collected too late and is gone",
    "internal_error": "a fault in warmq; please report it",
}
