"""What the rings of its queues tell of a batch: its share of cached prompt tokens, and time left.

An answer tells it only where vLLM was asked to (`--enable-prompt-tokens-details`), and that is
known once the batch has ended. Else it is that of the batch's queues in the minutes in which it
ran: its own where nothing else ran beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from contract.redis.ring import DAY, Minute, RingReads
from gateway.http.services import Services
from producer.time_left import Pace, left_s, pace_of

Rings = Mapping[str, Sequence[Minute]]


def rings_of(services: Services, rows: Iterable[dict[str, Any]]) -> Rings:
    """Return the last day of the queues of some rows of batches, no longer than they go back."""
    rows = list(rows)
    queues = {queue for row in rows for queue in row["queues"]}
    since = min((row["created_at"] for row in rows), default=0)
    minutes = min(DAY, max(2, int(time.time() - since) // 60 + 2))
    reads = RingReads.beside(services.batches)
    return {queue: reads.day([queue], minutes) for queue in sorted(queues)}


def by_rings(row: Mapping[str, Any], rings: Rings) -> dict[str, float | None]:
    """Return what is told of a batch's line: `cached_share`, and `left_s` until it has ended."""
    left = None if row["ended"] else _left_s(row, rings)
    return {"cached_share": cached_share(row, rings), "left_s": left}


def _left_s(row: Mapping[str, Any], rings: Rings) -> float | None:
    """Return how long the rest takes; parts in several queues run side by side."""
    of_queues = [pace for queue in row["queues"] if (pace := pace_of(rings.get(queue, ())))]
    if not of_queues:
        return None
    slots = sum(pace.slots for pace in of_queues)
    pace = Pace(sum(one.tokens_per_s for one in of_queues) / slots, slots)
    return left_s(pace, row["total"], row["done"], row["tokens_in"] + row["tokens_out"])


def cached_share(row: Mapping[str, Any], rings: Rings) -> float | None:
    """Return it, from 0 to 1; None where nothing is known: no prompt in the last day."""
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
