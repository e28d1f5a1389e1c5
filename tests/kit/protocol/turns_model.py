"""What turns must be, computed by hand: each counter to its last token, and who may be served next.

It follows what the scripts did, one step after another, and never takes a counter from Redis: one
that drifts, however slowly, is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from math import isclose

from kit.protocol.turns_seen import Charge, Counters, Place, Seen, place_of

#: Requests of a turn, at most; `turn` below may be fewer, as many as an engine has slots.
LONGEST_TURN = 32


@dataclass(slots=True)
class Ring:
    """Who waits, with the counter of each; who has left; the highest that a newcomer was given."""

    scores: Counters = field(default_factory=dict)
    left: Counters = field(default_factory=dict)
    given: float | None = None

    def charge(self, member: str, share: float, turn: float = 0.0) -> None:
        """Add to a counter. A refund leaves it at most a turn below what newcomers were given."""
        where = self.scores if member in self.scores else self.left
        if member not in where:
            return
        before, after = where[member], where[member] + share
        if share < 0 and self.given is not None:
            after = max(after, min(before, self.given - turn))
        where[member] = after

    def enter(self, member: str) -> bool:
        """Let one in at the least counter, or at its own if it left with more; whether it did."""
        among = self.scores or self.left
        begin = min(among.values(), default=self.given or 0.0)
        own = self.left.pop(member, begin)
        self.given = max(begin, self.given or begin) if self.scores else begin
        self.scores[member] = max(begin, own)
        return own <= begin


class TurnsModel:
    """All rings of a queue. Each method returns what is wrong with the step it is told of."""

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.rings = {step: Ring() for step in (0, 3, 6, 9)}
        self.lists: dict[Place, Ring] = {}
        #: Who came and has got nothing yet: where it began, and who was there before it.
        self.newcomers: dict[Place, tuple[float, set[str]]] = {}
        #: The dearest request of each tenant, by its weight of then.
        self.dearest: Counter[str] = Counter()
        self._seen = Seen()

    @property
    def seen(self) -> Seen:
        """What Redis said after the last step."""
        return self._seen

    def charge(
        self, list_key: str, tokens: float, share: float, turns: tuple[float, float]
    ) -> None:
        """Charge a list, and its tenant; `turns` is what a turn of both costs."""
        step, tenant = place_of(list_key)
        if tokens or share:
            self.rings[step].charge(tenant, share, turns[1])
            self.lists.get((step, tenant), Ring()).charge(list_key, tokens, turns[0])

    def ended(self, ends: Sequence[tuple[Charge, int]], after: Seen) -> list[str]:
        """Judge a step that ended leases of one list, each for so many tokens."""
        if ends:
            count = len(ends)
            _, tenant = place_of(ends[0][0].list)
            shares = [used / lease.weight for lease, used in ends]
            self.dearest[tenant] = max(self.dearest[tenant], *shares, 0)
            turns = LONGEST_TURN * sum(used for _, used in ends) / count
            self.charge(
                ends[0][0].list,
                sum(used - lease.cost for lease, used in ends),
                sum((used - lease.cost) / lease.weight for lease, used in ends),
                (turns, LONGEST_TURN * sum(shares) / count),
            )
        return self.moved(after)

    # -- POP ------------------------------------------------------------------------------

    def popped(
        self, leases: Sequence[Charge], going_on: tuple[str, int], wanted: int, after: Seen,
        urgent: Sequence[str] = (),
    ) -> list[str]:  # fmt: skip
        """Judge a POP of these leases, by a worker whose turn went on with a list.

        The `urgent` lists come first among those of their tenants.
        """
        found, before = list[str](), self._seen
        taken = Counter(lease.list for lease in leases)
        unused = {
            key: count - taken[key] - after.length.get(key, 0)
            for key, count in before.length.items()
        }
        slack = sum(
            count / before.weight_and_cap_of(place_of(key)[1])[0] for key, count in unused.items()
        )
        list_key, left = going_on
        if list_key not in urgent and _of_place(urgent, list_key):
            left = 0
        if left and any(
            n and place_of(key)[0] < place_of(list_key)[0] for key, n in unused.items()
        ):
            left = 0  # a list above had a turn since, although none of its messages could run
        for lease in leases:
            if lease.list != list_key or left <= 0:
                list_key, left = lease.list, self.turn
                found += self._out_of_turn(list_key, after, slack, urgent)
            left -= lease.sequences
            found += self._takes(lease)
        for key, count in unused.items():
            self.charge(key, count, count / before.weight_and_cap_of(place_of(key)[1])[0], (0, 0))
        found += _over_cap(before, after, leases)
        if len(leases) < wanted and any(after.rings.values()):
            found.append(f"{len(leases)} of {wanted} given, and {after.rings} wait")
        return found + self.moved(after)

    def _takes(self, lease: Charge) -> Iterator[str]:
        step, tenant = place_of(lease.list)
        weight, _ = self._seen.weight_and_cap_of(tenant)
        if lease.weight != weight:
            yield f"a lease of {tenant} has weight {lease.weight}, not {weight}"
        self.newcomers.pop((step, tenant), None)
        self.charge(lease.list, lease.cost, lease.cost / weight, (0, 0))

    def _out_of_turn(
        self, list_key: str, after: Seen, slack: float, urgent: Sequence[str]
    ) -> Iterator[str]:
        """Yield who should have been served before this list."""
        step, tenant = place_of(list_key)
        for above in (one for one in after.rings if one < step and after.rings[one]):
            yield f"{list_key} was served, and {after.rings[above]} wait above"
        both = (self.rings[step].scores, tenant, after.rings[step]), (
            self.lists[step, tenant].scores, list_key, after.lists.get((step, tenant), {}),
        )  # fmt: skip
        first = _of_place(urgent, list_key)
        for other in first[: first.index(list_key) if list_key in first else None]:
            if after.length.get(other):
                yield f"{list_key} was served before {other}, which is urgent"
        # An urgent list needs no turn of its own, but its tenant does.
        for scores, chosen, waiting in both[: 1 if list_key in first else 2]:
            for other in waiting.keys() & scores.keys():
                if scores[chosen] > scores[other] * (1 + 1e-9) + slack + 1e-3:
                    yield f"{chosen} ({scores[chosen]}) was before {other} ({scores[other]})"

    # -- who waits ------------------------------------------------------------------------

    def moved(self, after: Seen) -> list[str]:
        """Judge who came and who went, then everything that Redis says."""
        for place, counters in after.lists.items():
            ring = self.lists.setdefault(place, Ring())
            for key in counters.keys() - ring.scores.keys():
                given, empty = ring.given, not ring.scores
                ring.enter(key)
                ring.given = given if empty else ring.given
        for place, ring in list(self.lists.items()):
            for key in ring.scores.keys() - after.lists.get(place, {}).keys():
                del ring.scores[key]
            if not ring.scores:
                del self.lists[place]
        found = list[str]()
        for step, ring in self.rings.items():
            found += self._leave(step, ring, after)
            self._enter(step, ring, after)
        self._seen = after
        return [*found, *self._wrong(after)]

    def _leave(self, step: int, ring: Ring, after: Seen) -> Iterator[str]:
        highest = max([*ring.scores.values(), *after.rings[step].values()], default=0.0)
        for tenant in ring.scores.keys() - after.rings[step].keys():
            ring.left[tenant] = ring.scores.pop(tenant)
            self.newcomers.pop((step, tenant), None)
        # Who was served less than all that wait is forgotten: it will begin where they are.
        for tenant in ring.left.keys() - after.left[step].keys() - after.rings[step].keys():
            if (score := ring.left.pop(tenant)) > highest * (1 + 1e-9) + 1e-3:
                yield f"{tenant} was forgotten, although its counter was {score} of {highest}"

    def _enter(self, step: int, ring: Ring, after: Seen) -> None:
        """Let those in that came, in the order which gives what Redis has, if there is one."""
        came = after.rings[step].keys() - ring.scores.keys()
        for order in permutations(sorted(came)):
            tried = Ring(dict(ring.scores), dict(ring.left), ring.given)
            there = {tenant: set(tried.scores) for tenant in order}
            new = [tenant for tenant in order if tried.enter(tenant)]
            if not any(_differences(tried.scores, after.rings[step])):
                break
        ring.scores, ring.left, ring.given = tried.scores, tried.left, tried.given
        for tenant in new:
            self.newcomers[step, tenant] = ring.scores[tenant], there[tenant]

    # -- everything -----------------------------------------------------------------------

    def _wrong(self, seen: Seen) -> Iterator[str]:
        for step, ring in self.rings.items():
            yield from _differences(ring.scores, seen.rings[step])
            yield from _differences(ring.left, seen.left[step])
            if (ring.scores or ring.left) and not _same(ring.given, seen.given.get(step)):
                yield f"newcomers were given {ring.given}, not {seen.given.get(step)}"
        for place in self.lists.keys() | seen.lists.keys():
            ring = self.lists.get(place, Ring())
            yield from _differences(ring.scores, seen.lists.get(place, {}))
            if not _same(ring.given, seen.lists_given.get(place)):
                yield f"lists were given {ring.given}, not {seen.lists_given.get(place)}"
        yield from self._kept_waiting()
        yield from _counts(seen)

    def _kept_waiting(self) -> Iterator[str]:
        """A newcomer is behind nobody that was there by more than a turn of what that one costs."""
        for (step, tenant), (began, before) in self.newcomers.items():
            scores = self.rings[step].scores
            for other in before & scores.keys():
                lowest = began - LONGEST_TURN * self.dearest[other]
                if scores[other] < lowest * (1 - 1e-9) - 1e-3:
                    yield f"{tenant} began at {began}, {other} is at {scores[other]} < {lowest}"


def _of_place(urgent: Sequence[str], list_key: str) -> list[str]:
    """Return the urgent lists of a list's priority and tenant, in order."""
    return [one for one in urgent if list_key and place_of(one) == place_of(list_key)]


def _counts(seen: Seen) -> Iterator[str]:
    in_flight: Counter[str] = Counter()
    for lease in seen.leases.values():
        in_flight[place_of(lease.list)[1]] += lease.sequences
    if in_flight != seen.in_flight:
        yield f"in flight are {in_flight}, counted {seen.in_flight}"
    if sum(seen.length.values()) != seen.waiting:
        yield f"{seen.length} wait, counted are {seen.waiting}"
    if seen.deadlines != seen.due:
        yield f"marked are {seen.deadlines}, with a deadline are {seen.due}"
    if seen.noted:
        yield f"noted are leases that have ended: {seen.noted}"
    for key in (key for key, length in seen.length.items() if length):
        step, tenant = place_of(key)
        if key not in seen.lists.get((step, tenant), {}):
            yield f"{key} has no turn"
        if tenant not in seen.rings[step] and (step, tenant) not in seen.capped:
            yield f"{tenant} has no turn"


def _over_cap(before: Seen, after: Seen, leases: Sequence[Charge]) -> Iterator[str]:
    taken: Counter[str] = Counter()
    for lease in leases:
        taken[place_of(lease.list)[1]] += lease.sequences
    for tenant, count in taken.items():
        _, cap = before.weight_and_cap_of(tenant)
        alone = not before.in_flight.get(tenant) and len(
            [lease for lease in leases if place_of(lease.list)[1] == tenant]
        ) == 1  # fmt: skip
        if (held := after.in_flight.get(tenant, 0)) > cap and not alone:
            yield f"{tenant} got {count}, has {held} of {cap} in flight"


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return isclose(one, other, rel_tol=1e-9, abs_tol=1e-3)


def _differences(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Iterator[str]:
    for name in sorted(ours.keys() | theirs.keys()):
        if not _same(ours.get(name), theirs.get(name)):
            yield f"the counter of {name} is {theirs.get(name)}, should be {ours.get(name)}"
