"""Estimates batches' times left, and their shares of cached prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.batch import Batch as QueueBatch
from contract.naming import priority_step
from contract.redis.announcements import is_alive, queues_of
from contract.redis.history import Minute
from gateway.batches.api.record import BatchRecord
from gateway.http.services import Services
from producer.rates import Recent
from producer.time_left import Outlook, OutlookReads, Work

#: Queue -> its batches' work.
Works = dict[str, list[Work]]


@dataclass(frozen=True, slots=True)
class QueueState:
    """The minutes of a queue's last day, oldest first, and its outlook, if known."""

    minutes: Sequence[Minute]
    outlook: Outlook | None


def read_queues(services: Services, queues: Iterable[str]) -> dict[str, QueueState]:
    """Return the states of queues by name."""
    names = sorted(set(queues))
    reads = OutlookReads.using(services.batches)
    alive = [one for one in reads.announcements() if is_alive(one)] if names else []
    states = {}
    for queue in names:
        minutes = reads.day([queue])
        workers = [worker for worker in alive if queue in queues_of(worker)]
        states[queue] = QueueState(minutes, reads.outlook(queue, workers, minutes))
    return states


def works_of(source: QueueBatch | BatchRecord, parts: Sequence[QueueBatch], total: int) -> Works:
    """Return the work of a batch by queue; `total` counts its requests, also those not queued."""
    if isinstance(source, QueueBatch):
        return {queue: [Work.of(source)] for queue in source.queues}
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
    row: Mapping[str, Any], queues: Mapping[str, QueueState], recent: Recent | None = None
) -> dict[str, float | None]:
    """Return a row's `cached_share`, from 0 to 1, and `left_s`, the seconds until it ends.

    `recent` is the batch's own rate, which counts if it is known well enough.
    """
    left_s = None if row["ended"] else _left_s(row["works"], queues, recent)
    return {"cached_share": _cached_share(row), "left_s": left_s}


def _left_s(works: Works, queues: Mapping[str, QueueState], recent: Recent | None) -> float | None:
    """Return the seconds until the last of the works ends; None if one is unknown."""
    longest: float | None = None
    if sum(map(len, works.values())) > 1:  # the rate is that of all works
        recent = None
    for queue, several in works.items():
        for work in several:
            if work.left <= 0:
                continue
            state = queues.get(queue)
            left_s = state.outlook.seconds_left(work, recent) if state and state.outlook else None
            if left_s is None:
                return None
            longest = max(longest or 0.0, left_s)
    return longest


def _cached_share(row: Mapping[str, Any]) -> float | None:
    """Return the share of prompt tokens that came from the prefix cache; None if unknown.

    Answers have this number only if vLLM runs with `--enable-prompt-tokens-details`, and its sum is
    known once the batch has ended.
    """
    return row["cached"] / row["tokens_in"] if row["cached"] and row["tokens_in"] else None
