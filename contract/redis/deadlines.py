"""Reads which of a queue's batches have deadlines, and computes their order.

The order is contract/deadlines.py's. A queue without deadlines costs two round trips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from contract import naming
from contract.batch import Batch
from contract.deadlines import Late, Order, Queued, Terms, order
from contract.redis.history import HistoryReads
from contract.redis.pace import Pace, pace_of, slots_of
from contract.redis.tenants import Tenants
from contract.redis.waiting import WaitingReads

#: Most batches of a queue whose deadlines are considered: those with the earliest ones.
MOST = 250
#: Minutes of history that are read first; those of a whole day only if they had no work.
RECENT = 15


@dataclass(frozen=True, slots=True)
class LateBatch:
    """A batch that will miss its deadline: by `late_s`, and on how many slots it would not.

    `needed` is None if no number of slots meets the deadline.
    """

    batch_id: str
    tenant: str
    late_s: float
    slots: int
    needed: int | None


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """The order of a queue's lists, and its late batches; `pace` is None if it is not known."""

    order: Order = field(default_factory=Order)
    late: tuple[LateBatch, ...] = ()
    pace: Pace | None = None


class DeadlineReads(HistoryReads, WaitingReads, Tenants):
    """Reads deadlines in one Redis. Calls raise StoreUnavailable."""

    def deadline_order(self, queue: str, again_s: float = 0.0) -> QueueOrder:
        """Return the order of a queue's lists at the pace of its workers' last minutes.

        `again_s` is the time until the next read.
        """
        now_ms, key = self.now_ms(), naming.deadlines_key(queue)
        marks = self._client.zrangebyscore(key, now_ms, "+inf", 0, MOST, withscores=True)
        if not marks or not (slots := slots_of(self.workers(queue))):
            return QueueOrder()
        pace = pace_of(self.day([queue], RECENT), slots) or pace_of(self.day([queue]), slots)
        if pace is None or not pace.of_request:
            return QueueOrder()
        left_s = {raw.decode(): (at_ms - now_ms) / 1000 for raw, at_ms in marks}
        terms = {
            one.name: Terms(
                one.weight, math.inf if one.max_in_flight is None else one.max_in_flight
            )
            for one in self.tenants()
        }
        lists = [*self._marked(left_s, pace), *self._unmarked(queue, left_s, pace)]
        found = order(lists, pace.tokens_per_s, pace.of_slot, terms, again_s)
        if pace.rough or not found.late:
            return QueueOrder(found, (), pace)
        # More slots than requests do not help.
        most = sum(round(o.tokens / o.each) for o in lists) + sum(self.in_flight_by(queue).values())
        late = (_late_batch(key, one, round(pace.slots), most) for key, one in found.late.items())
        return QueueOrder(found, tuple(late), pace)

    def _marked(self, left_s: Mapping[str, float], pace: Pace) -> list[Queued]:
        """Return the lists with a deadline; cancelled batches take no time."""
        keys_of = list(left_s)
        lengths = self._each("llen", keys_of)
        batches = self.states([key.rpartition("\x06")[2] for key in keys_of])
        found = []
        for key, length, batch in zip(keys_of, lengths, batches, strict=True):
            if length and batch and not {"cancelling", "finished_at"} & batch.fields.keys():
                step, tenant = _place(key)
                each = _each_of(batch) or pace.of_request
                found.append(Queued(key, step, tenant, length * each, each, left_s[key]))
        return found

    def _unmarked(self, queue: str, left_s: Mapping[str, float], pace: Pace) -> list[Queued]:
        """Return the lists without a deadline, kombu's among them."""
        each, found = pace.of_request, []
        for one in self.waiting_lists(queue):
            key = naming.turn_list(queue, one.step, one.tenant, one.batch_id)
            if key not in left_s:
                found.append(Queued(key, one.step, one.tenant, one.requests * each, each))
        return found


def _each_of(batch: Batch) -> float:
    """Return the tokens of a batch's request: measured, or expected at its submit; 0 if unknown."""
    # The tokens of a retried batch also count the earlier answers of its requests.
    if batch.terminal and not batch.number("retried"):
        tokens = batch.number("prompt_tokens") + batch.number("completion_tokens")
        return tokens / batch.terminal
    expected, total = batch.expected or {}, batch.number("total")
    if not total or expected.get("completion_tokens") is None:
        return 0.0
    return float(expected["prompt_tokens"] + expected["completion_tokens"]) / total


def _place(key: str) -> tuple[int, str]:
    """Return step and tenant of a list of waiting requests."""
    step, tenant, _ = key.rpartition(naming.PRIORITY_SEPARATOR)[2].split("\x06")
    return int(step), tenant


def _late_batch(key: str, late: Late, slots: int, most: int) -> LateBatch:
    batch_id = key.rpartition("\x06")[2]
    needed = max(slots + 1, min(math.ceil(slots * late.factor), most)) if late.possible else None
    return LateBatch(batch_id, _place(key)[1], late.late_s, slots, needed)
