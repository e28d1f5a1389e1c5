"""Makes rows of batches for lists; shows, cancels and downloads one batch."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import orjson
from starlette.background import BackgroundTask
from starlette.responses import Response

from contract.batch import LEAST_HTTP_S, mean_rate
from contract.batch import Batch as QueueBatch
from gateway.batches.api import batches as api
from gateway.batches.api import virtual_files
from gateway.batches.api.protocol import (
    ERRORS,
    OUTPUT,
    PARTIAL,
    STOPPED,
    batch_object,
    part_ids,
)
from gateway.batches.api.protocol import Batch as ApiBatch
from gateway.batches.api.record import ENDED, RequestCounts, decode
from gateway.files.files import Files
from gateway.files.routes import content
from gateway.http.errors import ApiError, not_found
from gateway.http.services import Services
from gateway.page.estimates import estimates, works_of
from gateway.page.failed import failed_codes, retry_of
from gateway.page.file_reading import uploaded_name
from gateway.page.requests import sample
from gateway.page.summary import stalls_of
from gateway.page.view import View
from gateway.redis.batch_views import BatchView, BatchViews
from producer.request_reads import RequestReads, RunningRequest
from producer.time_left import OutlookReads

#: Batches on one page, and most running requests that are shown for one batch.
PAGE, MAX_RUNNING = 25, 12
#: Histograms on the page of a batch: title, and name in a `Sample`.
FIGURES = (
    ("Time in the queue", "queued_s"),
    ("Time in the engine", "engine_s"),
    ("Answer tokens", "tokens"),
)


def row_of(batch_view: BatchView, now: float) -> dict[str, Any] | None:
    """Return a batch as a row of the list; None if Anthropic's API made it.

    The rate is the mean so far; `live.py` measures the rate of the last seconds.
    The row's `works` has the batch's open requests by queue, for `estimates`. `submitted` is the
    batch; None if it was made over HTTP: then `parts` has the ids of its queue batches.
    """
    batch = batch_object(batch_view)
    if batch is None:
        return None
    counts, ended, metadata = batch.request_counts, batch.status in ENDED, batch.metadata or {}
    codes = {one.code: one.count for one in batch.failures or ()}
    cancelled, expired = (codes.pop(name, 0) for name in STOPPED)
    # As in OpenAI's API, `counts.failed` has all requests without an answer.
    failed = counts.failed - cancelled - expired
    done = counts.completed + failed
    ended_at = (
        batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
        if ended else None
    )  # fmt: skip
    seconds, retried = _seconds(batch_view, batch, ended_at or now)
    return {
        "id": batch.id,
        "status": batch.status,
        "tone": _tone(batch.status, counts),
        "ended": ended,
        "model": batch.model if isinstance(batch.model, str) else "",
        "name": metadata.get("name", ""),
        "input": metadata.get("input") or batch.input_file_id,
        "input_file_id": batch.input_file_id,
        "total": counts.total,
        "grows": isinstance(batch_view.source, QueueBatch) and batch_view.source.may_grow,
        "waits_for_run": isinstance(batch_view.source, QueueBatch)
        and batch_view.source.waits_for_run,
        "completed": counts.completed,
        "failed": failed,
        "cancelled": cancelled,
        "expired": expired,
        "done": done,
        "created_at": batch.created_at,
        "ended_at": ended_at,
        "seconds": seconds,
        "expires_at": batch.expires_at,
        "rate": mean_rate(done, seconds, retried=retried),
        **_answer_fields(batch),
        **_queue_fields(batch_view, counts.total),
        "failures": [*codes.items()],
        "error_file_id": batch.error_file_id,
    }


def _seconds(batch_view: BatchView, batch: ApiBatch, until: float) -> tuple[float | None, bool]:
    """Return the seconds that a batch has taken until now or its end, and if it was retried.

    Commands show the same for an ended batch (`Batch.shown_s`).
    """
    source, retried = batch_view.source, False
    if isinstance(source, QueueBatch):
        retried = bool(source.number("retried"))
        if source.finished:
            return source.shown_s, retried
    return max(LEAST_HTTP_S, until - (batch.in_progress_at or batch.created_at)), retried


def _answer_fields(batch: ApiBatch) -> dict[str, Any]:
    """Return a row's fields about tokens and known answers."""
    return {
        "tokens_in": batch.usage.input_tokens,
        "tokens_out": batch.usage.output_tokens,
        "cached": batch.usage.input_tokens_details.cached_tokens,
        "reused": batch.cached or 0,
    }


def _queue_fields(batch_view: BatchView, total: int) -> dict[str, Any]:
    """Return a row's fields about the batch's tenant, queues and planned duration."""
    if isinstance(batch := batch_view.source, QueueBatch):
        return {
            "tenant": batch.tenant,
            "queues": batch.queues,
            "expected_s": batch.expected_s,
            "works": works_of(batch, [], total),
            "submitted": batch,
            "parts": [],
        }
    record = decode(batch.document)
    # Its queue batches run concurrently, so the longest time counts.
    expected = filter(None, (record.expected_s, *(part.expected_s for part in batch_view.parts)))
    return {
        "tenant": record.tenant,
        "queues": sorted({part.queue for part in record.parts}),
        "expected_s": max(expected, default=None),
        "works": works_of(record, batch_view.parts, total),
        "submitted": None,
        "parts": [part.id for part in batch_view.parts],
    }


def _tone(status: str, counts: RequestCounts) -> str:
    """Return the name of a status's colour: a batch with failures is not green."""
    if status != "completed" or not counts.failed:
        return status
    return "partly" if counts.completed else "failed"


def batch_rows(view: View, after: str, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return a page's rows, and whether more rows follow."""
    rows, more = _rows(view, after, limit)
    add_names_and_estimates(view.services, rows)
    return rows, more


def newest_rows(view: View, limit: int) -> list[dict[str, Any]]:
    """Return rows of the newest batches, without what `add_names_and_estimates` adds."""
    return _rows(view, "", limit)[0]


def _rows(view: View, after: str, limit: int) -> tuple[list[dict[str, Any]], bool]:
    reads = BatchViews.using(view.services.batches)
    page = reads.page(view.caller.only_tenant, after=after, limit=limit)
    if page is None:
        raise not_found("batch", after)
    now = time.time()
    rows = [row for one in page.batches if (row := row_of(one, now)) is not None]
    return rows, page.has_more


def add_names_and_estimates(services: Services, rows: list[dict[str, Any]]) -> None:
    """Add to rows their input files' names, if these exist, and `estimates`."""
    ids = [row["input_file_id"] for row in rows]
    reads = OutlookReads.using(services.batches)
    outlooks = reads.outlooks(q for row in rows if not row["ended"] for q in row["queues"])
    for row, stored in zip(rows, services.objects.get_many("file", ids), strict=True):
        if stored is not None:
            name = str(orjson.loads(stored.document).get("filename") or "")
            row["input"] = uploaded_name(name) or row["input"]
        row.update(estimates(row, outlooks))


def watched(rows: list[dict[str, Any]]) -> str:
    """Return the ids of batches that may still change, for the live stream."""
    return ",".join(row["id"] for row in rows if not row["ended"])


def batch(view: View) -> Response:
    """Show a batch, with a sample of the requests that ended last."""
    services, batch_id = view.services, view.request.path_params["batch_id"]
    batch_view = api.view_of(services, view.caller, batch_id)
    row = row_of(batch_view, time.time())
    if row is None:
        raise not_found("batch", batch_id)
    add_names_and_estimates(services, [row])
    parts = [part for part in services.batches.states(part_ids(batch_view)) if part is not None]
    failed = failed_codes(services, batch_view, row)
    of_run = isinstance(batch_view.source, QueueBatch) and batch_view.source.is_run
    return view.page(
        "batch.html",
        row=row,
        batch=batch_object(batch_view),
        sample=sample(services, parts),
        failed=failed,
        of_run=of_run,
        as_table=row["ended"] and len(parts) == 1 and not of_run,
        complete=isinstance(batch_view.source, QueueBatch) and batch_view.source.complete,
        retry=retry_of(services, batch_view, row, failed),
        retry_cut=isinstance(batch_view.source, QueueBatch) and not of_run,
        stalls=stalls_of(view, [] if row["ended"] else [row]),
        figures=FIGURES,
        running=[] if row["ended"] else _running(services, parts),
        watched=batch_id,
    )


def _running(services: Services, parts: list[QueueBatch]) -> list[RunningRequest]:
    reads = RequestReads.using(services.batches)
    workers = reads.living()
    running = (one for part in parts for one in reads.running(part, workers, MAX_RUNNING))
    return [one for one in islice(running, MAX_RUNNING) if one.custom_id]


def cancel(view: View) -> Response:
    """Begin to cancel a batch."""
    batch_id = view.request.path_params["batch_id"]
    state, batch_view = api.cancel(view.services, view.caller, batch_id)
    background = None
    if isinstance(batch_view.source, QueueBatch) and state.status == "cancelling":
        background = BackgroundTask(view.services.batches.cancel, batch_view.source)
    return view.redirect(f"/ui/batches/{batch_id}", background, notice="cancelled")


def download(view: View) -> Response:
    """Send a batch's answers or errors; while the batch runs, those so far."""
    batch_id, kind = (view.request.path_params[name] for name in ("batch_id", "kind"))
    batch = batch_object(api.view_of(view.services, view.caller, batch_id), partial=True)
    ids = {"answers": batch.output_file_id, "errors": batch.error_file_id} if batch else {}
    file_id = ids.get(kind)
    if not file_id:
        raise ApiError(404, f"batch {batch_id} has no {kind[:20]} (yet)", code="file_not_found")
    if file_id.startswith((OUTPUT, ERRORS, PARTIAL)):
        return virtual_files.content(view.services, view.caller, file_id, 0)
    record = Files(view.services).get(view.caller.tenant, file_id)
    if record is None or view.services.store.size(file_id) is None:
        raise not_found("file", file_id)
    return content(view.services.store, record, view.request.headers)
