"""Converts batches, of gateways and of `producer submit`, to the JSON of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from contract.batch import Batch as QueueBatch
from contract.failures import CodeFailures, failures_of
from contract.redis.failures import FailedCode
from gateway.batches.api.record import (
    ENDED,
    BatchError,
    BatchRecord,
    RequestCounts,
    Status,
    Usage,
    decode,
)
from gateway.files.protocol import LEAST_LIFE_S, MOST_LIFE_S
from gateway.redis.batch_views import BatchView

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]
Seconds = Annotated[int, Meta(ge=LEAST_LIFE_S, le=MOST_LIFE_S)]


class OutputExpiresAfter(Struct):
    """When output and error files are removed: `seconds` after their creation."""

    anchor: Literal["created_at"]
    seconds: Seconds


class BatchCreate(Struct, kw_only=True):
    """Body of `POST /v1/batches`. `order`, `once` and `priority` are warmq's (the SDKs'
    `extra_body`); other fields are ignored."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None
    order: Literal["input", "prefix", "auto"] | None = None
    once: bool | None = None
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None


class BatchErrors(Struct, kw_only=True):
    """A list of errors."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class InputDetails(Struct, kw_only=True):
    """Input tokens that came from the prefix cache; known once the batch has ended."""

    cached_tokens: int = 0


class OutputDetails(Struct, kw_only=True):
    """Output tokens that were reasoning; known once the batch has ended."""

    reasoning_tokens: int = 0


class BatchUsage(Struct, kw_only=True):
    """Tokens of all answers."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class CodeCount(Struct, kw_only=True):
    """How many lines failed with one error code; '' if it is not known."""

    code: str
    count: int


class Batch(Struct, kw_only=True):
    """A batch. Unknown fields are null, except `model`, which is left out.

    `failures` (by error code, the most frequent first), `cut` (answers that ended at their token
    limit) and `cached` (requests that known answers answered) are warmq's; they are left out if
    empty.
    """

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | UnsetType = UNSET
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage
    metadata: dict[str, str] | None = None
    failures: list[CodeCount] | UnsetType = UNSET
    cut: int | UnsetType = UNSET
    cached: int | UnsetType = UNSET


class BatchList(Struct, kw_only=True):
    """A page of batches, newest first."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


#: Prefixes of the ids of files made on request (virtual_files.py): output files, error files, and
#: the results so far of a running batch.
OUTPUT, ERRORS, PARTIAL = "file-out-", "file-err-", "file-partial-"
_INPUT = "file-in-"
#: Outcomes of requests without an answer; in `failures` they are codes.
STOPPED = ("cancelled", "expired")
_NO_LINE = "no line of the file is a valid request; the error file has the error of each"


def batch_object(view: BatchView, *, partial: bool = False) -> Batch | None:
    """Return a batch as OpenAI's API shows it; None if Anthropic's API made it.

    With `partial` the output file of a running batch is the file of its results so far.
    """
    if isinstance(view.source, QueueBatch):
        return _of_queue(view.source, partial)
    record = decode(view.source.document)
    return _of_record(record, view.parts, partial) if record.api == "openai" else None


def part_ids(view: BatchView) -> list[str]:
    """Return the ids of a batch's queue batches."""
    if isinstance(view.source, QueueBatch):
        return [part.id for part in view.source.parts]
    return [part.batch_id for part in decode(view.source.document).parts]


def _of_record(record: BatchRecord, parts: list[QueueBatch], partial: bool) -> Batch:
    ended = record.status in ENDED
    output_id = record.output_file_id
    if partial and not ended and record.parts:
        output_id = PARTIAL + record.id
    answer = Batch(
        id=record.id,
        endpoint=record.endpoint,
        model=record.model or msgspec.UNSET,
        errors=_errors(record.problems if record.status == "failed" else None, record.stopped),
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status,
        output_file_id=output_id,
        error_file_id=record.error_file_id,
        created_at=record.created_at,
        expires_at=record.expires_at,
        request_counts=_counts(record.counts, [] if ended else parts),
        usage=_usage(record.usage or _usage_of(parts)),
        metadata=record.metadata,
        **(_own_fields_at_end(record) if ended else _own_fields_of(parts)),
    )
    for status in record.changed_at.keys() - {"validating"}:
        setattr(answer, f"{status}_at", record.changed_at[status])
    return answer


def _errors(problems: list[BatchError] | None, stopped: str) -> BatchErrors | None:
    """Return the reasons why a batch failed, or was cancelled without its user; else None."""
    if stopped:
        problems = [*(problems or []), BatchError("too_many_failures", stopped)]
    return None if problems is None else BatchErrors(data=problems)


def _counts(counts: RequestCounts, parts: Sequence[QueueBatch]) -> RequestCounts:
    """Return a record's counts, or those of its queue batches where they are higher."""
    total = sum(part.number("total") for part in parts)
    completed = sum(part.number("completed") for part in parts)
    failed = sum(part.terminal for part in parts) - completed
    return RequestCounts(
        max(counts.total, total), max(counts.completed, completed), max(counts.failed, failed)
    )


def _own_fields_of(parts: Sequence[QueueBatch]) -> dict[str, Any]:
    stopped = [CodeFailures(name, sum(part.number(name) for part in parts)) for name in STOPPED]
    codes = [*failures_of(parts), *stopped]
    cut, cached = (sum(part.number(name) for part in parts) for name in ("cut", "cached"))
    return _own_fields(codes, cut, cached)


def _own_fields_at_end(record: BatchRecord) -> dict[str, Any]:
    codes: list[CodeFailures | FailedCode] = [*record.failures]
    if record.status in STOPPED:  # what failed with no code had no answer when the batch ended
        rest = record.counts.failed - sum(one.count for one in codes)
        codes.append(CodeFailures(record.status, rest))
    return _own_fields(codes, record.cut, record.cached)


def _own_fields(
    codes: Sequence[CodeFailures | FailedCode], cut: int, cached: int
) -> dict[str, Any]:
    """Return the fields `failures`, `cut` and `cached`, without those that have nothing."""
    counts = [CodeCount(code=one.code, count=one.count) for one in codes if one.count > 0]
    counts.sort(key=lambda one: -one.count)
    fields = {"failures": counts, "cut": cut, "cached": cached}
    return {name: value for name, value in fields.items() if value}


def _usage_of(parts: Sequence[QueueBatch]) -> Usage:
    return Usage(
        input=sum(part.number("prompt_tokens") for part in parts),
        output=sum(part.number("completion_tokens") for part in parts),
    )


def _usage(usage: Usage) -> BatchUsage:
    return BatchUsage(
        input_tokens=usage.input,
        input_tokens_details=InputDetails(cached_tokens=usage.cached),
        output_tokens=usage.output,
        output_tokens_details=OutputDetails(reasoning_tokens=usage.reasoning),
        total_tokens=usage.input + usage.output,
    )


def _of_queue(batch: QueueBatch, partial: bool) -> Batch:
    """Return a batch of `producer submit` as OpenAI's API shows it.

    Its lines may name several endpoints, so `endpoint` is ''. Its input file is not in a gateway's
    store; `metadata` has the file's name.
    """
    counts = _counts(RequestCounts(), [batch])
    created, status = int(batch.created) // 1000, batch.status
    ended_at = batch.number("finished_at") // 1000 or None
    made_by = "producer run" if batch.is_run else "producer submit"
    answer = Batch(
        id=batch.id,
        endpoint="",
        input_file_id=_INPUT + batch.id,
        completion_window=_window(batch),
        status=status,  # type: ignore[arg-type]  # a `deleting` batch has no view
        created_at=created,
        in_progress_at=created if batch.sealed else None,
        expires_at=batch.number("deadline") // 1000 or None,
        request_counts=counts,
        usage=_usage(_usage_of([batch])),
        metadata={"submitted_by": made_by, "input": batch.fields.get("input", "")[:512]},
        errors=_errors(None, batch.fields["reason"] if batch.stopped else ""),
        **_own_fields_of([batch]),
    )
    if model := batch.fields.get("model"):
        answer.model = model
    if status in ENDED:
        setattr(answer, f"{status}_at", ended_at)
        if not batch.is_run:  # the run itself writes the files
            answer.output_file_id = OUTPUT + batch.id if counts.completed else None
            answer.error_file_id = ERRORS + batch.id if counts.failed else None
        if status == "failed":
            error = BatchError(code="invalid_request", message=_NO_LINE)
            answer.errors = BatchErrors(data=[error])
    elif partial and not batch.is_run:
        answer.output_file_id = PARTIAL + batch.id
    return answer


def _window(batch: QueueBatch) -> str:
    """Return the time from a batch's creation to its deadline as a text: `24h`, or `none`."""
    left_s = 0
    with suppress(ValueError):
        left_s = round((batch.number("deadline") - int(batch.created)) / 1000)
    if left_s <= 0:
        return "none"
    for unit, seconds in (("h", 3600), ("m", 60)):
        if left_s % seconds == 0:
            return f"{left_s // seconds}{unit}"
    return f"{left_s}s"
