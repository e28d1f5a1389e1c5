"""Estimates batches' times left, and their shares of cached prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contract.batch import Batch as QueueBatch
from contract.naming import priority_step
from gateway.batches.api.record import BatchRecord
from producer.time_left import Outlook, Work, seconds_left, works_by_queue

#: Queue -> its batches' work.
Works = dict[str, list[Work]]


def works_of(source: QueueBatch | BatchRecord, parts: Sequence[QueueBatch], total: int) -> Works:
    """Return the work of a batch by queue; `total` counts its requests, also those not queued."""
    if isinstance(source, QueueBatch):
        return works_by_queue(source)
    counted = sum(part.number("total") for part in parts)
    works: Works = {}
    for one, part in zip(source.parts, parts, strict=False):
        work = Work.of(part)._replace(tenant=source.tenant, step=priority_step(source.priority))
        if counted:  # the lines that the runner has not queued yet go to the same queues
            rest = max(0, total - counted) * part.number("total") / counted
            work = work._replace(left=work.left + round(rest))
        works.setdefault(one.queue, []).append(work)
    return works


def estimates(
    row: Mapping[str, Any], outlooks: Mapping[str, Outlook | None]
) -> dict[str, float | None]:
    """Return a row's `cached_share`, from 0 to 1, and `left_s`, the seconds until it ends."""
    left_s = None if row["ended"] else seconds_left(row["works"], outlooks)
    return {"cached_share": _cached_share(row), "left_s": left_s}


def _cached_share(row: Mapping[str, Any]) -> float | None:
    """Return the share of prompt tokens that came from the prefix cache; None if unknown.

    Answers have this number only if vLLM runs with `--enable-prompt-tokens-details`, and its sum is
    known once the batch has ended.
    """
    return row["cached"] / row["tokens_in"] if row["cached"] and row["tokens_in"] else None
