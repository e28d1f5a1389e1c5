"""Batches: a page of them, newest first, each with its bar, rate and remaining time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from contract.batch import Batch as QueueBatch
from contract.redis.history import DAY, HistoryReads, Minute
from gateway.batches.api.protocol import shown
from gateway.batches.api.record import ENDED, decode
from gateway.http.errors import not_found
from gateway.http.services import Services
from gateway.page.view import View
from gateway.redis.batch_views import BatchView, BatchViews
from producer.time_left import Pace, pace_of, seconds_left

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
        "ended_at": ended_at,
        "seconds": seconds,
        "expires_at": batch.expires_at,
        "rate": rate,
        "tokens_in": batch.usage.input_tokens,
        "tokens_out": batch.usage.output_tokens,
        "cached": batch.usage.input_tokens_details.cached_tokens,
        "expected_s": _expected_s(view),
        "queues": _queues(view),
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
    reads = BatchViews.using(view.services.batches)
    found = reads.page(view.caller.tenant, after=after, limit=limit)
    if found is None:
        raise not_found("batch", after)
    now = time.time()
    rows = [row for one in found.batches if (row := row_of(one, now)) is not None]
    name_inputs(view, rows)
    rings = rings_of(view.services, rows)
    for row in rows:
        row.update(by_rings(row, rings))
    return rows, found.has_more


def name_inputs(view: View, rows: list[dict[str, Any]]) -> None:
    """Say the names of the files that batches were made of, where they are still there."""
    ids = [row["input_file_id"] for row in rows]
    for row, stored in zip(rows, view.services.objects.get_many("file", ids), strict=True):
        if stored is not None:
            row["input"] = str(orjson.loads(stored.document).get("filename") or row["input"])


def batches(view: View) -> Response:
    """Show a page of the caller's batches."""
    rows, more = batch_rows(view, view.query.get("after", "")[:200], PAGE)
    return view.page("batches.html", rows=rows, more=more, now_watched=watched(rows))


def watched(rows: list[dict[str, Any]]) -> str:
    """Return the ids of batches that may still change, for the live stream."""
    return ",".join(row["id"] for row in rows if not row["ended"])


Rings = Mapping[str, Sequence[Minute]]


def rings_of(services: Services, rows: Iterable[dict[str, Any]]) -> Rings:
    """Return the last day of the queues of some rows of batches, no longer than they go back."""
    rows = list(rows)
    queues = {queue for row in rows for queue in row["queues"]}
    since = min((row["created_at"] for row in rows), default=0)
    minutes = min(DAY, max(2, int(time.time() - since) // 60 + 2))
    reads = HistoryReads.using(services.batches)
    return {queue: reads.day([queue], minutes) for queue in sorted(queues)}


def by_rings(row: Mapping[str, Any], rings: Rings) -> dict[str, float | None]:
    """Return what is told of a batch's line: `cached_share`, and `left_s` until it has ended."""
    left = None if row["ended"] else _left_s(row, rings)
    return {"cached_share": _cached_share(row, rings), "left_s": left}


def _left_s(row: Mapping[str, Any], rings: Rings) -> float | None:
    """Return how long the rest takes; parts in several queues run side by side."""
    of_queues = [pace for queue in row["queues"] if (pace := pace_of(rings.get(queue, ())))]
    if not of_queues:
        return None
    slots = sum(pace.slots for pace in of_queues)
    pace = Pace(sum(one.tokens_per_s for one in of_queues) / slots, slots)
    return seconds_left(pace, row["total"], row["done"], row["tokens_in"] + row["tokens_out"])


def _cached_share(row: Mapping[str, Any], rings: Rings) -> float | None:
    """Return which share of a batch's prompt tokens came from the prefix cache, from 0 to 1; None
    where nothing is known: no prompt in the last day.

    An answer tells it only where vLLM was asked to (`--enable-prompt-tokens-details`), and that is
    known once the batch has ended. Else it is that of the batch's queues in the minutes in which it
    ran: its own where nothing else ran beside it.
    """
    if row["cached"] and row["tokens_in"]:
        return float(row["cached"] / row["tokens_in"])
    first, last = row["created_at"] // 60, (row["ended_at"] or time.time()) // 60
    found = [
        minute
        for queue in row["queues"]
        for minute in rings.get(queue, ())
        if first <= minute.minute <= last
    ]
    read = sum(minute.prompt_tokens for minute in found)
    return min(1.0, sum(minute.cached_tokens for minute in found) / read) if read else None
