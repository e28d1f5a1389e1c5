"""A queue's batches on some slots, in virtual time: POP's turns, with the order of deadlines."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from contract.deadlines import Order, Queued, Terms, order

#: Seconds between two reads of the order, as in worker/drain/deadlines.py.
READ_S = 3.0


@dataclass
class Batch:
    """Requests of `each` tokens that come at `comes_s` and are to end by `deadline_s`."""

    name: str
    requests: int
    each: float
    deadline_s: float | None = None
    tenant: str = "t"
    step: int = 6
    comes_s: float = 0.0
    #: When the last request ended; requests that ran before the deadline.
    ended_s: float = 0.0
    in_time: int = 0

    @property
    def met(self) -> bool:
        """Whether all requests ended in time."""
        return self.deadline_s is None or (not self.requests and self.ended_s <= self.deadline_s)


@dataclass
class Simulation:
    """Runs batches to their ends; `error` is the factor by which tokens are estimated wrongly."""

    batches: list[Batch]
    slots: int = 8
    of_slot: float = 10.0
    terms: Mapping[str, Terms] = field(default_factory=dict)
    error: float = 1.0
    ordered: bool = True
    #: Tokens served by tenant while all of them had work; the first time of each late batch.
    served: Counter[str] = field(default_factory=Counter)
    named_s: dict[str, float] = field(default_factory=dict)
    _counters: Counter[str] = field(default_factory=Counter)

    def read(self, now: float) -> Order:
        """Return the order of what waits now."""
        lists = [
            Queued(
                one.name, one.step, one.tenant, one.requests * one.each * self.error,
                one.each * self.error, None if one.deadline_s is None else one.deadline_s - now,
            )
            for one in self.batches if one.requests and one.comes_s <= now
        ]  # fmt: skip
        found = order(lists, self.slots * self.of_slot, self.of_slot, self.terms, READ_S)
        for name in found.late:
            self.named_s.setdefault(name, now)
        return found if self.ordered else Order()

    def run(self) -> Simulation:
        """Let slots take requests, one at a time, until none waits."""
        free, found, read_at = [0.0] * self.slots, Order(), 0.0
        tenants = {one.tenant for one in self.batches}
        while any(one.requests for one in self.batches):
            now = heapq.heappop(free)
            if now >= read_at:
                found, read_at = self.read(now), now + READ_S
            waiting = [one for one in self.batches if one.requests and one.comes_s <= now]
            for one in waiting:
                if one.deadline_s is not None and one.deadline_s <= now:
                    one.requests, one.ended_s = 0, float("inf")  # they expire
            waiting = [one for one in waiting if one.requests]
            if not waiting:
                heapq.heappush(free, now + 0.5)
                continue
            one = self._next(waiting, found)
            if {each.tenant for each in waiting} == tenants:
                self.served[one.tenant] += round(one.each)
            self._charge(one)
            one.requests -= 1
            one.ended_s = max(one.ended_s, now + one.each / self.of_slot)
            one.in_time += 1
            heapq.heappush(free, now + one.each / self.of_slot)
        return self

    def _next(self, waiting: list[Batch], found: Order) -> Batch:
        step = min(one.step for one in waiting)
        waiting = [one for one in waiting if one.step == step]
        tenant = min({one.tenant for one in waiting}, key=lambda t: (self._counters[f"\0{t}"], t))
        own = {one.name: one for one in waiting if one.tenant == tenant}
        urgent = [name for name in found.urgent if name in own]
        return own[urgent[0] if urgent else min(own, key=lambda n: (self._counters[n], n))]

    def _charge(self, one: Batch) -> None:
        weight = self.terms.get(one.tenant, Terms()).weight
        self._counters[f"\0{one.tenant}"] += one.each / weight  # type: ignore[assignment]
        self._counters[one.name] += one.each  # type: ignore[assignment]
