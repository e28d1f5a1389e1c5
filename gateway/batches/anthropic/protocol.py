"""Converts batches and their results to the JSON of Anthropic's Message Batches API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal

import msgspec
import orjson
from msgspec import Struct

from contract.redis.objects import Stored
from contract.results import one_line
from gateway.batches.api.output_lines import in_chunks
from gateway.batches.api.record import ENDED, BatchRecord
from gateway.file_store import lines_of
from gateway.files.files import Files
from gateway.http.errors import anthropic_error
from gateway.http.services import Services

#: Seconds from a batch's creation to its deadline, and seconds for which its results are kept.
WINDOW_S, KEPT_S = 86_400, 29 * 86_400
ENDPOINT = "/v1/messages"
PREFIX = "msgbatch_"


class FailureCounts(Struct, omit_defaults=True):
    """Counts of an ended batch's requests without an answer, by result type."""

    errored: int = 0
    canceled: int = 0
    expired: int = 0


class RequestCounts(Struct, kw_only=True):
    """Requests by state; all are `processing` until the batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(Struct, kw_only=True):
    """One message batch; times are in RFC 3339 format."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: RequestCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None = None
    results_url: str | None


class MessageBatchList(Struct, kw_only=True):
    """A page of message batches."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Deleted(Struct, kw_only=True):
    """The answer to the DELETE of a message batch."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


def message_batch(record: BatchRecord, failures: FailureCounts, base_url: str) -> MessageBatch:
    """Return a batch as Anthropic's API shows it, with URLs that begin with `base_url`."""
    ended, at = record.status in ENDED, record.changed_at
    if ended:
        counts = RequestCounts(
            succeeded=record.counts.completed, errored=failures.errored, canceled=failures.canceled,
            expired=failures.expired,
        )  # fmt: skip
    else:
        counts = RequestCounts(processing=record.counts.total)
    running: Literal["in_progress", "canceling"] = (
        "canceling" if "cancelling" in at else "in_progress"
    )
    return MessageBatch(
        id=record.id,
        processing_status="ended" if ended else running,
        request_counts=counts,
        created_at=_time(record.created_at),
        expires_at=_time(record.expires_at),
        ended_at=_time(at[record.status]) if ended and record.status in at else None,
        cancel_initiated_at=_time(at["cancelling"]) if "cancelling" in at else None,
        results_url=f"{base_url}/v1/messages/batches/{record.id}/results" if ended else None,
    )


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


_failures: msgspec.json.Decoder[FailureCounts | None] = msgspec.json.Decoder(FailureCounts | None)


def failures_in(stored: Stored) -> FailureCounts | None:
    return _failures.decode(stored.document)


class _Response(Struct):
    status_code: int
    body: msgspec.Raw
    request_id: str | None = None


class _Error(Struct):
    code: str | None = None
    message: str | None = None


class _Line(Struct):
    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


class _Body(Struct):
    error: _Error | None = None


_line = msgspec.json.Decoder(_Line).decode
_body = msgspec.json.Decoder(_Body).decode
#: OpenAI's error code for a request without an answer -> Anthropic's result type.
_ENDINGS = {"batch_expired": "expired", "batch_cancelled": "canceled"}


def _lines_of_file(services: Services, tenant: str, file_id: str | None) -> Iterator[bytes]:
    if file_id is not None and Files(services).get(tenant, file_id) is not None:
        yield from lines_of(services.store.read(file_id))


def _result_type(line: _Line) -> str:
    """Return Anthropic's result type for a line of an output or error file."""
    if line.error is not None:
        return _ENDINGS.get(line.error.code or "", "errored")
    if line.response is None or line.response.status_code != 200:
        return "errored"
    return "succeeded"


def count_failures(services: Services, record: BatchRecord) -> FailureCounts:
    """Count the requests without an answer by reading the error file."""
    if record.status == "failed":  # the whole file was refused
        return FailureCounts(errored=record.counts.total)
    if not record.counts.failed:
        return FailureCounts()
    failures = FailureCounts()
    for raw in _lines_of_file(services, record.tenant, record.error_file_id):
        result_type = _result_type(_line(raw))
        setattr(failures, result_type, getattr(failures, result_type) + 1)
    return failures


def _result_line(raw: bytes) -> bytes:
    line = _line(raw)
    result_type = _result_type(line)
    result: dict[str, Any] = {"type": result_type}
    if result_type == "succeeded" and line.response is not None:
        result["message"] = orjson.Fragment(bytes(line.response.body))
    elif result_type == "errored":
        result["error"] = _error(line)
    return one_line(orjson.dumps({"custom_id": line.custom_id, "result": result}))


def _error(line: _Line) -> dict[str, Any]:
    status, request_id, error = 500, None, line.error
    if line.response is not None:
        status, request_id = line.response.status_code, line.response.request_id
        error = _body(line.response.body).error
    message = (error and (error.message or error.code)) or "the request failed"
    return anthropic_error(status, message, request_id)


def _refused_results(services: Services, record: BatchRecord) -> Iterator[bytes]:
    """Yield a result for each request of a batch whose file was refused."""
    message = "; ".join(problem.message for problem in record.problems[:3]) or "it was refused"
    result = {"type": "errored", "error": anthropic_error(400, message, None)}
    for raw in _lines_of_file(services, record.tenant, record.input_file_id):
        yield one_line(orjson.dumps({"custom_id": _line(raw).custom_id, "result": result}))


def results(services: Services, record: BatchRecord) -> Iterator[bytes]:
    """Yield an ended batch's results, one on each line, in pieces of about 128 KiB."""
    if record.status == "failed":
        return in_chunks(_refused_results(services, record))
    files = (record.output_file_id, record.error_file_id)
    lines = chain.from_iterable(
        _lines_of_file(services, record.tenant, file_id) for file_id in files
    )
    return in_chunks(map(_result_line, lines))
