"""Errors by who must act; their codes are stable (docs/reference/errors.md describes each)."""

from typing import Literal

#: Remedies that each user interface words in its own terms.
Remedy = Literal[
    "collect_earlier", "follow_results", "name_error_file", "new_batch_id", "other_tokenizer",
    "read_new_batch", "report", "resume_submit", "same_options", "submit_again",
    "submit_from_start",
]  # fmt: skip


class WarmqError(Exception):
    """Base of every error that warmq raises on purpose.

    `message` states the problem, and the remedy unless `remedy` is set: then the user interface
    words it, with the `facts` that it names.
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
    """The request is wrong, and its author must change it; never retried."""

    code = "invalid_request"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        custom_id: str | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.field = field
        self.custom_id = custom_id


def bad_field(field: str, problem: str, code: str | None = None) -> RequestRejected:
    """Return the error for a field of a request, whose name may begin with `body.`."""
    return RequestRejected(f"field {field}: {problem}", code=code, field=field)


class RequestFailed(WarmqError):
    """This attempt failed while the engine lives: a retry may help."""

    code = "request_failed"


class EngineDead(WarmqError):
    """The engine cannot run anything: the worker rebuilds it or exits.

    `inside`: the request was inside the engine when it died, and may have been the cause.
    """

    code = "engine_dead"

    def __init__(self, message: str, *, inside: bool = True) -> None:
        super().__init__(message)
        self.inside = inside


class StoreUnavailable(WarmqError):
    """Redis cannot be reached or refuses: the operator must act, results are kept."""

    code = "store_unavailable"


class StoreUnreachable(StoreUnavailable):
    """There is no connection to Redis, or it broke: sent commands may have run."""


class StoreFull(StoreUnavailable):
    """Redis has no memory for this write: it fits once results are collected."""


class StoreRefused(StoreUnavailable):
    """Redis refuses this write whenever it is sent: a retry does not help."""

    code = "result_refused"


class StoreForbidden(StoreUnavailable):
    """Redis' user lacks permission for this command or key: its administrator must give it."""


class ProtocolMismatch(WarmqError):
    """Another version of warmq uses this Redis, and the two do not understand each other."""

    code = "protocol_mismatch"


class BatchConflict(WarmqError):
    """The batch exists in a state that forbids the call."""

    code = "batch_conflict"


class ExtraMissing(WarmqError):
    """A needed package is not installed; the message names the extra that brings it."""

    code = "extra_missing"
