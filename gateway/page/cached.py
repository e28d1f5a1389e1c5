"""Which share of a batch's prompt tokens came from the prefix cache.

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

Rings = Mapping[str, Sequence[Minute]]


def rings_of(services: Services, rows: Iterable[dict[str, Any]]) -> Rings:
    """Return the last day of the queues of some rows of batches, no longer than they go back."""
    rows = list(rows)
    queues = {queue for row in rows for queue in row["queues"]}
    since = min((row["created_at"] for row in rows), default=0)
    minutes = min(DAY, max(2, int(time.time() - since) // 60 + 2))
    reads = RingReads.beside(services.batches)
    return {queue: reads.day([queue], minutes) for queue in sorted(queues)}


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
