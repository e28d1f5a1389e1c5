"""Decides which batches run first so that the most deadlines are met; uses no clock and no Redis.

Between tenants turns hold: a tenant with weight w gets its share of the rate, whatever its
deadlines are. Within a tenant and priority, turns hold as long as every deadline that can be met is
met with them. `order` computes

1. the most tokens that the tenant can get until each deadline (`_Share.until`);
2. the largest set of batches whose deadlines can be met, earliest deadline first (Moore and
   Hodgson's algorithm), so that one that cannot be met does not ruin the rest;
3. which of these must run now (`urgent`), because the time left is not longer than their work;
4. how late each batch outside the set ends (`late`).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: The share of the time until a deadline that is kept in reserve, because estimates are not exact.
RESERVE = 0.1
#: A batch that misses its deadline by less than this share of the time left may still meet it.
CLOSE = 0.1


class Queued(NamedTuple):
    """The waiting requests of one list: their tokens in all, and those of one request.

    `left_s` is the time until the deadline of their batch; None without one.
    """

    key: str
    step: int
    tenant: str
    tokens: float
    each: float
    left_s: float | None = None


class Late(NamedTuple):
    """A batch that will miss its deadline by `late_s`; `factor` times the slots would meet it.

    `possible` is False if no number of slots would: one request takes longer than the time left, or
    the tenant's cap is too low.
    """

    late_s: float
    factor: float
    possible: bool = True


@dataclass(frozen=True, slots=True)
class Order:
    """The lists that come first within their tenants' turns, in order, and those that are late."""

    urgent: tuple[str, ...] = ()
    late: Mapping[str, Late] = field(default_factory=dict)


class Terms(NamedTuple):
    """The weight of a tenant, and the most of its requests that run at a time."""

    weight: float = 1.0
    cap: float = math.inf


def order(
    lists: Iterable[Queued],
    tokens_per_s: float,
    of_slot: float,
    tenants: Mapping[str, Terms],
    again_s: float,
) -> Order:
    """Return the order of a queue's lists.

    `tokens_per_s` is the rate of all slots, `of_slot` that of one; `tenants` has the terms of the
    tenants that do not have the defaults. `again_s` is the time until the next call: until then the
    order holds.
    """
    if tokens_per_s <= 0 or of_slot <= 0:
        return Order()
    by_step: dict[int, dict[str, list[Queued]]] = defaultdict(lambda: defaultdict(list))
    for one in lists:
        # Expired requests take no time, and those of a tenant with a cap of 0 do not run.
        if (one.left_s is None or one.left_s > 0) and tenants.get(one.tenant, Terms()).cap > 0:
            by_step[one.step][one.tenant].append(one)
    urgent, late, above = list[str](), dict[str, Late](), 0.0
    for step in sorted(by_step):
        amounts = {name: sum(o.tokens for o in own) for name, own in by_step[step].items()}
        for name, own in by_step[step].items():
            terms = tenants.get(name, Terms())
            rivals = [
                (amount, tenants.get(other, Terms()).weight / terms.weight)
                for other, amount in amounts.items()
                if other != name
            ]
            share = _Share(tokens_per_s, above, rivals, of_slot * terms.cap)
            found = _order_of(own, share, of_slot, again_s)
            urgent += found.urgent
            late |= found.late
        above += sum(amounts.values())
    return Order(tuple(urgent), late)


@dataclass(frozen=True, slots=True)
class _Share:
    """What one tenant gets of the rate, at one priority.

    `above` are the tokens of higher priorities, which run before. `rivals` are the tokens of each
    other tenant, and its weight divided by this one's. `most` is the rate at this tenant's cap.
    """

    rate: float
    above: float
    rivals: Sequence[tuple[float, float]]
    most: float

    def until(self, seconds: float) -> float:
        """Return the most tokens of the tenant that can be done within `seconds`."""
        given = seconds * self.rate - self.above
        if given <= 0:
            return given
        # While the rest has work, each token of this tenant costs 1 + the sum of their weights.
        done, ratio = 0.0, 1.0 + sum(weight for _, weight in self.rivals)
        for amount, weight in sorted(self.rivals, key=lambda one: one[0] / one[1]):
            until = amount / weight  # this tenant's tokens when the other one's work ends
            if (until - done) * ratio >= given:
                break
            given -= (until - done) * ratio
            done, ratio = until, ratio - weight
        return min(done + given / max(ratio, 1.0), seconds * min(self.rate, self.most))

    def seconds(self, tokens: float) -> float:
        """Return the seconds until so many tokens of the tenant are done."""
        theirs = sum(min(amount, tokens * weight) for amount, weight in self.rivals)
        return max((self.above + tokens + theirs) / self.rate, tokens / self.most)


def _order_of(own: Sequence[Queued], share: _Share, of_slot: float, again_s: float) -> Order:
    """Return the order of one tenant's lists at one priority."""
    due = sorted((o for o in own if o.left_s is not None), key=lambda o: (_left(o), o.key))
    if not due:
        return Order()
    met, dropped = _moore_hodgson(due, {o.key: share.until(_left(o)) for o in due})
    # A free slot is at most one request away, and the last request of a batch takes its time, too.
    wait_s = again_s + max(o.each for o in own) / of_slot
    urgent, begins, before = 0, 0.0, 0.0
    for number, one in enumerate(met, 1):
        begins += one.tokens
        left_s = _left(one) * (1 - RESERVE) - wait_s - one.each / of_slot
        if begins >= share.until(left_s):
            urgent, before = number, begins
    first = [o.key for o in met[:urgent]]
    late = dict[str, Late]()
    for one in dropped:
        alone_s = max(share.seconds(one.tokens), one.each / of_slot)
        if alone_s <= _left(one) * (1 + CLOSE):
            first.append(one.key)  # behind those that can be met
        rest = [o for o in own if o.key != one.key and o.key not in first[:urgent]]
        meanwhile = before + sum(min(o.tokens, one.tokens) for o in rest)
        ends_s = max(share.seconds(one.tokens + meanwhile), one.each / of_slot)
        late_s = ends_s - _left(one)
        if late_s > _left(one) * CLOSE + one.each / of_slot:
            least_s = max((one.tokens + meanwhile) / share.most, one.each / of_slot)
            late[one.key] = Late(late_s, ends_s / _left(one), least_s <= _left(one))
    return Order(tuple(first), late)


def _moore_hodgson(
    due: Sequence[Queued], room: Mapping[str, float]
) -> tuple[list[Queued], list[Queued]]:
    """Split lists, earliest deadline first, into the most that can be met, and the rest.

    `room` has for each list the tokens that can be done until its deadline.
    """
    kept: list[tuple[float, str, Queued]] = []
    dropped, total = set[str](), 0.0
    for one in due:
        heapq.heappush(kept, (-one.tokens, one.key, one))
        total += one.tokens
        if total > room[one.key]:
            longest = heapq.heappop(kept)[2]
            total -= longest.tokens
            dropped.add(longest.key)
    return [o for o in due if o.key not in dropped], [o for o in due if o.key in dropped]


def _left(one: Queued) -> float:
    return one.left_s or 0.0
