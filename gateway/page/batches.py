"""Batches: a page of them, newest first, each with its bar, rate and remaining time."""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.responses import Response

from contract.batch import Batch as QueueBatch
from gateway.batches.api.protocol import shown
from gateway.batches.api.record import ENDED, decode
from gateway.http.errors import not_found
from gateway.page.cached import by_rings, rings_of
from gateway.page.view import View
from gateway.redis.batch_views import BatchView, BatchViews

PAGE = 25


def row_of(view: BatchView, now: float) -> dict[str, Any] | None:
    """Return what a line of the list says of a batch; None for one of another API.

    The rate is the mean since the batch began. What its queues' rings tell is added by `by_rings`.
    """
    batch = shown(view)
    if batch is None:
        return None
    counts, ended = batch.request_counts, batch.status in ENDED
    done = counts.completed + counts.failed
    began = batch.in_progress_at or batch.created_at
    ended_at = (
        batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
        if ended else None
    )  # fmt: skip
    # These are whole seconds: what took less took at most one.
    seconds = max(1.0, (ended_at or now) - began)
    rate = done / seconds if done else None
    return {
        "id": batch.id,
        "status": batch.status,
        "ended": ended,
        "model": batch.model if isinstance(batch.model, str) else "",
        "input": (batch.metadata or {}).get("input") or batch.input_file_id,
        "input_file_id": batch.input_file_id,
        "total": counts.total,
        "completed": counts.completed,
        "failed": counts.failed,
        "done": done,
        "created_at": batch.created_at,
        "began_at": began,
        "ended_at": ended_at,
        "seconds": seconds,
        "expires_at": batch.expires_at,
        "rate": rate,
        "tokens_in": batch.usage.input_tokens,
        "tokens_out": batch.usage.output_tokens,
        "cached": batch.usage.input_tokens_details.cached_tokens,
        "expected_s": _expected_s(view),
        "queues": _queues(view),
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
    }


def _expected_s(view: BatchView) -> float | None:
    """Return what its submit expected of its time, where it did; its parts run side by side."""
    if isinstance(view.source, QueueBatch):
        return view.source.expected_s
    known = [decode(view.source.document).expected_s, *(part.expected_s for part in view.parts)]
    return max(filter(None, known), default=None)


def _queues(view: BatchView) -> list[str]:
    if isinstance(view.source, QueueBatch):
        return [view.source.fields.get("queue", "")]
    return sorted({part.queue for part in decode(view.source.document).parts})


def batch_rows(view: View, after: str, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return a page's lines, and whether there are more after them."""
    reads = BatchViews.beside(view.services.batches)
    found = reads.page(view.caller.tenant, after=after, limit=limit)
    if found is None:
        raise not_found("batch", after)
    now = time.time()
    rows = [row for one in found.batches if (row := row_of(one, now)) is not None]
    name_inputs(view, rows)
    return rows, found.has_more


def name_inputs(view: View, rows: list[dict[str, Any]]) -> None:
    """Say the names of the files that batches were made of, where they are still there."""
    ids = [row["input_file_id"] for row in rows]
    for row, stored in zip(rows, view.services.objects.several("file", ids), strict=True):
        if stored is not None:
            row["input"] = str(orjson.loads(stored.document).get("filename") or row["input"])


def batches(view: View) -> Response:
    """Show a page of the caller's batches."""
    rows, more = batch_rows(view, view.query.get("after", "")[:200], PAGE)
    rings = rings_of(view.services, rows)
    for row in rows:
        row.update(by_rings(row, rings))
    ids = ",".join(row["id"] for row in rows if not row["ended"])
    return view.page("batches.html", rows=rows, more=more, now_watched=ids)


def record_of(view: BatchView) -> Any:
    """Return the gateways' record of a batch; None for one of `producer submit`."""
    return None if isinstance(view.source, QueueBatch) else decode(view.source.document)
