"""Estimates when batches end, from the workers' tokens per second in their last minutes of work.

`producer plan`, `submit`, `status`, `watch`, `top` and a gateway's page show the same estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from contract.batch import Batch
from contract.errors import StoreForbidden
from contract.naming import PRIORITY_SEPARATOR
from contract.redis.announced_models import load_seconds
from contract.redis.announcements import is_alive, is_silent, queues_of
from contract.redis.history import HistoryReads
from contract.redis.pace import Pace, pace_of, slots_of
from contract.redis.tenants import Tenants
from contract.redis.waiting import WaitingList, WaitingReads
from producer.lost_leases import LostLeaseReads, Place

#: The default priority, which is assumed for a batch whose list is not known.
_DEFAULT_STEP = 6


def left_of(batch: Batch) -> int:
    """Return the number of requests that have not ended, with those that a run queues later.

    It is 0 if the run has queued nothing more: its `producer run` may have ended.
    """
    if batch.waits_for_run:
        return 0
    unread = batch.number("unread") if batch.is_run and not batch.stopped else 0
    return batch.number("total") - batch.terminal + unread


class Work(NamedTuple):
    """The requests of a batch that have not ended.

    `left` is their number. The `done` requests used `tokens` in all, from which the tokens of the
    left ones are estimated; if `done` is 0, the queue's last minutes give the estimate. `batch_id`
    is that of the list in which the requests wait (WaitingList); None if they are not queued. With
    `several`, the batch has several queues, and `in_queue` counts the requests of one.
    """

    batch_id: str | None
    tenant: str
    step: int
    left: int
    done: int = 0
    tokens: int = 0
    several: bool = False

    @classmethod
    def of(cls, batch: Batch) -> Work:
        """Return the work of a batch in Redis."""
        # The field `list` has a list's key, which ends <step>\x06<tenant>\x06<batch id>.
        place = batch.fields.get("list", "").rpartition(PRIORITY_SEPARATOR)[2].split("\x06")
        step = int(place[0]) if place[0].isdecimal() else _DEFAULT_STEP
        done = max(0, batch.done - batch.number("cached"))  # known answers count no tokens
        tokens = batch.number("prompt_tokens")
        tokens += batch.number("completion_tokens")
        list_of = place[2] if len(place) == 3 else batch.id
        left = left_of(batch)
        if batch.number("retried"):  # `tokens` also counts the earlier answers of retried requests
            done = tokens = 0
        return cls(list_of, batch.tenant, step, left, done, tokens, len(batch.queues) > 1)

    def in_queue(self, lists: Iterable[WaitingList]) -> Work:
        """Return the work in the queue with these lists; with `several`, of waiting requests."""
        if not self.several:
            return self
        place = (self.step, self.tenant, self.batch_id)
        waiting = (one for one in lists if (one.step, one.tenant, one.batch_id) == place)
        return self._replace(left=sum(one.requests for one in waiting))


def works_by_queue(batch: Batch) -> dict[str, list[Work]]:
    """Return the work of a batch in Redis for each of its queues."""
    return {queue: [Work.of(batch)] for queue in batch.queues}


@dataclass(frozen=True, slots=True)
class Outlook:
    """The pace of a queue, and the lists in which requests wait there.

    `load_s` are the seconds until its model is loaded, for workers of several models. `caps` has
    the most slots of each tenant that has a cap, `held` the seconds until the leases of dead
    workers return requests to a list. `workers` has the ids of those that serve the queue.
    """

    pace: Pace
    lists: Sequence[WaitingList] = ()
    load_s: float = 0.0
    caps: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[Place, float] = field(default_factory=dict)
    workers: frozenset[str] = frozenset()

    def slots_of(self, tenant: str) -> float:
        """Return the most slots that serve a tenant."""
        return min(self.pace.slots, self.caps.get(tenant, math.inf))

    def seconds_left(self, work: Work) -> float | None:
        """Return the seconds until a work ends, behind the requests before it; None if unknown."""
        held_s, of_request = self.held_s(work), self._of_request(work)
        work = work.in_queue(self.lists)
        if work.several and not work.left:
            return held_s
        if work.left <= 0 or not of_request or self.pace.too_rough:
            return None
        own_s = self.seconds(work.left * of_request, work)
        return None if own_s is None else max(own_s, held_s)

    def seconds(self, tokens: float, work: Work) -> float | None:
        """Return the seconds until a work, with `tokens`, and the requests before it have ended.

        Returns None for a tenant whose cap is 0.
        """
        before, slots = requests_before(self.lists, work), self.slots_of(work.tenant)
        if slots <= 0:
            return None
        all_s = self.pace.ends(tokens, work.left, before)
        own = replace(self.pace, slots=slots).ends(tokens, work.left, own_before(self.lists, work))
        return self.load_s + max(all_s, own)

    def held_s(self, work: Work) -> float:
        """Return the seconds until the last request of a dead worker can run; 0 without any."""
        held_s = self.held.get((work.step, work.tenant, work.batch_id or ""), 0.0)
        return held_s + self.pace.seconds(self._of_request(work), 1) if held_s > 0 else 0.0

    def _of_request(self, work: Work) -> float:
        """Return the tokens of a request of a work; 0 if unknown."""
        return work.tokens / work.done if work.done else self.pace.of_request


def seconds_left(
    works: Mapping[str, Iterable[Work]], outlooks: Mapping[str, Outlook | None]
) -> float | None:
    """Return the seconds until the last of a batch's works ends; None if one is unknown.

    Both are by queue. Queues with the same workers wait for each other.
    """
    by_workers = dict[frozenset[str], float]()
    for queue, several in works.items():
        outlook, longest_s = outlooks.get(queue), 0.0
        for work in several:
            if work.left <= 0:
                continue
            left_s = outlook.seconds_left(work) if outlook else None
            if left_s is None or outlook is None:
                return None
            longest_s = max(longest_s, left_s)
            by_workers.setdefault(outlook.workers, 0.0)
        if outlook is not None and outlook.workers in by_workers:
            by_workers[outlook.workers] += longest_s
    return max(by_workers.values(), default=None)


def requests_before(lists: Iterable[WaitingList], work: Work) -> int:
    """Return the number of waiting requests of other batches that run before a batch's end.

    All requests of a higher priority run before. At the same priority, the batches of a tenant take
    turns, and so do the tenants; all weights are assumed to be equal.
    """
    own, above, of_tenants = _before(lists, work)
    turns = own + work.left
    return own + above + sum(min(count, turns) for count in of_tenants.values())


def own_before(lists: Iterable[WaitingList], work: Work) -> int:
    """Return the number of those that are of the batch's own tenant, at all priorities."""
    above = sum(o.requests for o in lists if o.step < work.step and o.tenant == work.tenant)
    return above + _before(lists, work)[0]


def _before(lists: Iterable[WaitingList], work: Work) -> tuple[int, int, Counter[str]]:
    """Return what runs before a batch's end: its tenant's turns, higher priorities, other tenants.

    The last ones are all that wait at the same priority.
    """
    own, above, of_tenants = 0, 0, Counter[str]()
    for one in lists:
        if one.step < work.step:
            above += one.requests
        elif one.step == work.step and one.tenant == work.tenant:
            # The batch's own list may also have requests of other batches (--turn fifo).
            waits = one.requests if one.batch_id != work.batch_id else one.requests - work.left
            own += max(0, min(waits, work.left))
        elif one.step == work.step:
            of_tenants[one.tenant] += one.requests
    return own, above, of_tenants


class OutlookReads(HistoryReads, WaitingReads, LostLeaseReads, Tenants):
    """Reads the outlook of queues in one Redis. Calls raise StoreUnavailable."""

    def outlooks(self, queues: Iterable[str]) -> dict[str, Outlook | None]:
        """Return the outlook of each queue on its workers that are alive and not silent."""
        alive = [one for one in self.announcements() if is_alive(one) and not is_silent(one)]
        by_queue = {q: [one for one in alive if q in queues_of(one)] for q in sorted(set(queues))}
        return {queue: self.outlook_of([queue], found) for queue, found in by_queue.items()}

    def outlook_of(
        self, queues: Collection[str], workers: Sequence[Mapping[str, Any]]
    ) -> Outlook | None:
        """Return the outlook of queues that share these workers, as of one.

        Returns None if they have no slots, or if the queues had no work in the last day.
        """
        if not (slots := slots_of(workers)):
            return None
        pace = pace_of(self.day(queues), slots)
        if pace is None:
            return None
        lists = [one for queue in queues for one in self.waiting_lists(queue)]
        lost = self.lost_leases()
        held = {k: v for q in queues if q in lost for k, v in lost[q].places.items()}
        ids = frozenset(str(worker["id"]) for worker in workers)
        return Outlook(pace, lists, load_seconds(workers, queues), self._caps(), held, ids)

    def _caps(self) -> dict[str, float]:
        try:
            found = self.tenants()
        except StoreForbidden:
            return {}
        return {one.name: one.max_in_flight for one in found if one.max_in_flight is not None}

    def workers_of(self, queues: Iterable[str]) -> list[dict[str, Any]]:
        """Return the announcements of the living workers of some queues, each once."""
        found = {worker["id"]: worker for queue in queues for worker in self.workers(queue)}
        return list(found.values())

    def batch_seconds_left(self, batch: Batch) -> float | None:
        """Return the seconds until a batch ends; None if it has ended, or if that is unknown."""
        if batch.finished:
            return None
        return seconds_left(works_by_queue(batch), self.outlooks(batch.queues))
