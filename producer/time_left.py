"""Estimates times left, from the workers' tokens per second in the last minutes with work.

`producer plan`, `submit`, `status`, `watch`, `top` and the page show the same estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from contract.batch import Batch
from contract.naming import PRIORITY_SEPARATOR
from contract.redis.history import HistoryReads, Minute
from contract.redis.waiting import WaitingList, WaitingReads

#: Most minutes that count: the latest minutes with work in the last day.
MINUTES = 5
#: The priority step of a batch whose list is not known.
_USUAL_STEP = 6
#: Requests of those minutes below which a time is rough: the first ones wait for compilation.
FEW = 30


@dataclass(frozen=True, slots=True)
class Pace:
    """The rate of a queue's workers.

    `of_slot` is the tokens, read and written, of one slot in one second; `of_request` the mean
    tokens of a request. `requests` is how many it was measured on; None if unknown.
    """

    of_slot: float
    slots: float
    of_request: float = 0.0
    requests: int | None = None

    @property
    def rough(self) -> bool:
        """Whether it was measured on few requests."""
        return self.requests is not None and self.requests < FEW

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all slots."""
        return self.of_slot * self.slots

    def seconds(self, tokens: float, requests: int) -> float:
        """Return the seconds that these tokens take. A request uses one slot."""
        return tokens / (self.of_slot * max(1.0, min(self.slots, requests)))

    def ends(self, tokens: float, requests: int, before: int) -> float:
        """Return the seconds that these tokens and `before` other requests take."""
        return self.seconds(tokens + before * self.of_request, requests + before)


def pace_of(minutes: Sequence[Minute], slots: int = 0) -> Pace | None:
    """Return the pace of `minutes` (oldest first); None if none of them had work.

    `slots` is the present number of slots; 0 means the number in those minutes.
    """
    worked = [m for m in minutes if m.busy_s and m.prompt_tokens + m.completion_tokens][-MINUTES:]
    if not worked:
        return None
    tokens = sum(minute.prompt_tokens + minute.completion_tokens for minute in worked)
    requests = sum(minute.completed + minute.other for minute in worked)
    were = max(minute.slots_s for minute in worked) / 60
    busy_s = sum(minute.busy_s for minute in worked)
    of_request = tokens / requests if requests else 0.0
    return Pace(tokens / busy_s, slots or were, of_request, requests)


class Work(NamedTuple):
    """The requests of a batch that have not ended, in one queue.

    `tokens` are those of the `done` requests, from which the tokens of the `left` ones are
    estimated; without any, those of the queue's last minutes are. `batch_id` is that of the list in
    which the requests wait (WaitingList); None if they are not queued. With `several` the batch has
    other queues, too: `left` are those of all, of which the waiting ones are counted in each.
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
        """Return the work of a batch in Redis; its field `list` has the list's key."""
        place = batch.fields.get("list", "").rpartition(PRIORITY_SEPARATOR)[2].split("\x06")
        step = int(place[0]) if place[0].isdecimal() else _USUAL_STEP
        done, tokens = batch.terminal, batch.number("prompt_tokens")
        tokens += batch.number("completion_tokens")
        list_of = place[2] if len(place) == 3 else batch.id
        left = batch.number("total") - done
        if batch.number("retried"):  # `tokens` has also those of answers that run again
            done = tokens = 0
        return cls(list_of, batch.tenant, step, left, done, tokens, len(batch.queues) > 1)

    def in_queue(self, lists: Iterable[WaitingList]) -> Work:
        """Return the part of the work that waits in a queue with these lists."""
        if not self.several:
            return self
        place = (self.step, self.tenant, self.batch_id)
        return self._replace(left=sum(one.requests for one in lists if one[:3] == place))


@dataclass(frozen=True, slots=True)
class Outlook:
    """The pace of a queue, and the lists in which requests wait there."""

    pace: Pace
    lists: Sequence[WaitingList] = ()

    def seconds_left(self, work: Work) -> float | None:
        """Return the seconds until a batch ends, including requests before it; None if unknown."""
        work = work.in_queue(self.lists)
        of_request = work.tokens / work.done if work.done else self.pace.of_request
        if work.several and not work.left:
            return 0.0
        if work.left <= 0 or not of_request:
            return None
        before = requests_before(self.lists, work)
        return self.pace.ends(work.left * of_request, work.left, before)


def requests_before(lists: Iterable[WaitingList], work: Work) -> int:
    """Return the number of waiting requests of other batches that run before a batch's end.

    These are all requests of a higher priority, and at the same priority as many as the turns give:
    the batches of a tenant take turns, and so do tenants of the same weight.
    """
    before, own, of_tenants = 0, work.left, Counter[str]()
    for one in lists:
        if one.step < work.step:
            before += one.requests
        elif one.step == work.step and one.tenant == work.tenant:
            waits = one.requests if one.batch_id != work.batch_id else one.requests - work.left
            own += max(0, min(waits, work.left))
        elif one.step == work.step:
            of_tenants[one.tenant] += one.requests
    return before + own - work.left + sum(min(count, own) for count in of_tenants.values())


def slots_of(workers: Iterable[Mapping[str, Any]]) -> int:
    """Return the slots of the workers that can run requests."""
    able = (one for one in workers if one.get("state") not in ("draining", "degraded"))
    return sum(n for one in able if isinstance(n := one.get("slots"), int))


class OutlookReads(HistoryReads, WaitingReads):
    """Reads the outlook of queues in one Redis. Calls raise StoreUnavailable."""

    def outlook(
        self,
        queue: str,
        workers: Iterable[Mapping[str, Any]],
        minutes: Sequence[Minute] | None = None,
    ) -> Outlook | None:
        """Return a queue's outlook on these workers; None if it had no work in the last day.

        `minutes` are those of the last day, if they are known already.
        """
        if not (slots := slots_of(workers)):
            return None
        pace = pace_of(self.day([queue]) if minutes is None else minutes, slots)
        return None if pace is None else Outlook(pace, self.waiting_lists(queue))

    def batch_seconds_left(self, batch: Batch) -> float | None:
        """Return the seconds to the end of a batch of `producer submit`; None if unknown."""
        if batch.finished:
            return None
        work, by_workers = Work.of(batch), dict[tuple[str, ...], float]()
        for queue in batch.queues:
            workers = self.workers(queue)
            found = self.outlook(queue, workers)
            left_s = found.seconds_left(work) if found else None
            if left_s is None:
                return None
            # Queues with the same workers wait for each other.
            ids = tuple(sorted(worker["id"] for worker in workers))
            by_workers[ids] = by_workers.get(ids, 0.0) + left_s
        return max(by_workers.values())
