"""Defines warmq's errors, by who must act. docs/reference/errors.md describes their codes."""

from typing import Literal

#: Names of remedies for which each user interface has its own text.
Remedy = Literal[
    "collect_earlier", "follow_results", "give_delimiter", "name_error_file", "new_batch_id",
    "other_tokenizer", "read_new_batch", "report", "resume_submit", "same_options", "submit_again",
    "submit_from_start",
]  # fmt: skip


class WarmqError(Exception):
    """The base class of every error that warmq raises on purpose.

    `message` states the problem and the remedy. If `remedy` is set, it is the code of a remedy that
    the message lacks: the user interface adds its text of this remedy, with `facts` filled in.
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
    """The request is wrong and its author must change it; it is never retried."""

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
    """Return the error about a request's field; its name may begin with `body.`."""
    return RequestRejected(f"field {field}: {problem}", code=code, field=field)


class RequestFailed(WarmqError):
    """The attempt failed, but the engine still runs: a retry may help."""

    code = "request_failed"


class EngineDead(WarmqError):
    """The engine can run no requests: the worker rebuilds it or exits.

    `inside`: the request was in the engine when the engine died, and may have been the cause.
    """

    code = "engine_dead"

    def __init__(self, message: str, *, inside: bool = True) -> None:
        super().__init__(message)
        self.inside = inside


class StoreUnavailable(WarmqError):
    """Redis cannot be reached or refuses commands: the operator must act; results are kept."""

    code = "store_unavailable"


class StoreUnreachable(StoreUnavailable):
    """No connection to Redis can be made, or one broke: commands already sent may have run."""


class StoreFull(StoreUnavailable):
    """Redis has no memory for this write; it has some again once batches are deleted or expire."""


class StoreRefused(StoreUnavailable):
    """Redis refuses this write whenever it is sent, so a retry does not help."""

    code = "result_refused"


class StoreForbidden(StoreUnavailable):
    """The Redis user may not call this command or use this key: Redis's operator must allow it."""


class ProtocolMismatch(WarmqError):
    """Data in Redis was written by a version of warmq that this version cannot read."""

    code = "protocol_mismatch"


class BatchConflict(WarmqError):
    """The batch or other object that the call names is in a state that does not allow the call."""

    code = "batch_conflict"


class BatchNotFound(BatchConflict):
    """There is no batch of this id (any more)."""

    code = "batch_not_found"


class ExtraMissing(WarmqError):
    """A needed package is not installed; the message names warmq's extra that installs it."""

    code = "extra_missing"
