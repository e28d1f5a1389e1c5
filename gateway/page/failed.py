"""Counts a batch's failures by error code, and the requests that a retry would run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contract.batch import Batch as QueueBatch
from contract.failures import wrong_count
from contract.redis.failures import FailedCode, FailedRequest
from contract.redis.objects import Stored
from gateway.batches.api.failures import failures_of_view
from gateway.http.services import Services
from gateway.page.requests import OTHER_REMEDY, REMEDIES
from gateway.redis.batch_views import BatchView
from producer.request_reads import RequestReads

#: Outcomes that a retry may run again, by the name of their button.
OUTCOMES = {"failed": ("failed",), "stopped": ("cancelled", "expired")}


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """The failed lines with one error code: their number, the remedy, and the first of them."""

    code: str
    count: int
    remedy: str
    first: list[FailedRequest]


@dataclass(frozen=True, slots=True)
class Retry:
    """The numbers of requests that a retry would run, and of lines that it cannot run (`invalid`).

    `stopped` requests are cancelled or expired. `anew`: a retry makes a new batch.
    """

    failed: int = 0
    stopped: int = 0
    invalid: int = 0
    anew: bool = False


def failed_codes(
    services: Services, batch_view: BatchView, row: Mapping[str, Any]
) -> list[FailureGroup]:
    """Return a batch's failures by code, the most frequent first; stopped requests come last."""
    failures = failures_of_view(services, batch_view)
    stopped = [FailedCode(name, row[name]) for name in OUTCOMES["stopped"] if row[name]]
    failures = [*failures, *stopped]
    source = batch_view.source
    return [
        FailureGroup(
            one.code, one.count, REMEDIES.get(_entry(one.code, source), OTHER_REMEDY), one.first
        )
        for one in failures
    ]


def _entry(code: str, source: Stored | QueueBatch) -> str:
    """Return the name of the remedy for an error code in such a batch."""
    if not isinstance(source, QueueBatch):
        return "expired_over_http" if code == "expired" else code
    if source.is_run and code == "cancelled":
        if source.complete:
            return "cancelled_in_complete_run"
        return "stopped_in_run" if source.stopped else "cancelled_in_run"
    return code


def retry_of(
    services: Services, batch_view: BatchView, row: Mapping[str, Any], codes: list[FailureGroup]
) -> Retry:
    """Return what a retry would run; before the batch has ended, only a run's invalid lines."""
    unanswered = row["failed"] + row["cancelled"] + row["expired"]
    invalid = wrong_count(codes)
    if isinstance(batch_view.source, QueueBatch) and batch_view.source.is_run:
        return Retry(invalid=invalid)  # its requests are deleted
    if not row["ended"] or not unanswered:
        return Retry()
    if isinstance(batch_view.source, QueueBatch):
        retryable = RequestReads.using(services.batches).retryable(batch_view.id)
        stopped = min(
            retryable, batch_view.source.number("cancelled") + batch_view.source.number("expired")
        )
        return Retry(retryable - stopped, stopped, invalid)
    if row["status"] == "failed":  # the whole file was refused
        return Retry()
    return Retry(failed=max(0, unanswered - invalid), invalid=invalid, anew=True)
