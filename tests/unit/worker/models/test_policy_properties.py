"""The policy's promises, for drawn backlogs: what `choose` may and may not decide."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.models.policy import (
    LEAST_STAY_S,
    STAY_FOR_SWAP,
    Demand,
    Stay,
    Swap,
    Terms,
    choose,
    default_stay_s,
)

MODELS = ("a", "b", "c", "d", "e")
SECONDS = st.floats(0, 5000)

DEMANDS = st.builds(
    Demand,
    requests=st.integers(0, 500),
    tokens=st.floats(0, 1e6),
    oldest_s=SECONDS,
    online_s=st.none() | SECONDS,
    slack_s=st.just(math.inf) | st.floats(-500, 500),
    slots=st.sampled_from([0, 0, 16, 64, 500]),
    weight=st.sampled_from([1.0, 1.0, 0.1, 3.0]),
    served=st.floats(0, 1e7),
    due=st.sampled_from([0.0, 0.0, 0.2, 0.6]),
)
TERMS = st.builds(
    Terms,
    swap_s=st.floats(0.5, 120),
    min_stay_s=st.floats(0, 1000),
    max_wait_s=st.floats(1, 3000),
    max_online_wait_s=st.floats(1, 600),
    slot_rate=st.sampled_from([0.0, 5.0, 100.0]),
)
ALL_DEMANDS = st.fixed_dictionaries(dict.fromkeys(MODELS, DEMANDS))
ALL_TERMS = st.fixed_dictionaries(dict.fromkeys(MODELS, TERMS))
STAYS = st.builds(
    Stay, st.sampled_from([None, *MODELS]), SECONDS, st.booleans(), st.integers(1, 256)
)

drawn = settings(max_examples=200, deadline=None)
Backlog = dict[str, Demand]
AllTerms = dict[str, Terms]


def in_need(stay: Stay, demands: Backlog) -> Backlog:
    """Return what waits for other models and is not all taken by workers that serve it."""
    return {
        model: demand for model, demand in demands.items()
        if model != stay.model and demand.requests and demand.requests > demand.slots
    }  # fmt: skip


def late(stay: Stay, terms: AllTerms) -> bool:
    """Whether the loaded model has had its stay."""
    if stay.model is None:
        return True
    own = terms[stay.model]
    return stay.seconds >= (own.min_stay_s if stay.has_work else own.pause_s)


@drawn
@given(SECONDS)
def test_the_default_stay_is_twenty_swaps_and_at_least_a_minute(swap_s: float) -> None:
    assert default_stay_s(swap_s) == max(60.0, 20 * swap_s)
    assert (STAY_FOR_SWAP, LEAST_STAY_S) == (20, 60)


@drawn
@given(STAYS, ALL_DEMANDS, ALL_TERMS)
def test_a_swap_is_to_another_model_with_requests(
    stay: Stay, demands: Backlog, terms: AllTerms
) -> None:
    if swap := choose(stay, demands, terms):
        assert swap.model != stay.model and demands[swap.model].requests > 0


@drawn
@given(STAYS, ALL_DEMANDS, ALL_TERMS)
def test_no_stay_is_cut_short(stay: Stay, demands: Backlog, terms: AllTerms) -> None:
    if not late(stay, terms):
        assert choose(stay, demands, terms) is None


@drawn
@given(STAYS, DEMANDS, TERMS)
def test_one_model_is_never_swapped(stay: Stay, demand: Demand, terms: Terms) -> None:
    assert choose(Stay("a", stay.seconds, stay.has_work), {"a": demand}, {"a": terms}) is None


@drawn
@given(STAYS, ALL_DEMANDS, ALL_TERMS)
def test_deadlines_come_first_then_online_requests(
    stay: Stay, demands: Backlog, terms: AllTerms
) -> None:
    if not late(stay, terms):
        return
    need = in_need(stay, demands)
    due = {m: d.slack_s for m, d in need.items() if d.slack_s <= terms[m].swap_s}
    swap = choose(stay, demands, terms)
    if due:
        assert swap is not None and demands[swap.model].slack_s == min(due.values())
        return
    online = {
        m: d.online_s - terms[m].max_online_wait_s for m, d in need.items()
        if d.online_s is not None and d.online_s >= terms[m].max_online_wait_s
    }  # fmt: skip
    if online:
        assert swap is not None and online.get(swap.model) == max(online.values())


@drawn
@given(STAYS, ALL_DEMANDS, ALL_TERMS)
def test_a_queue_without_a_worker_waits_no_longer_than_the_stay_beyond_max_wait(
    stay: Stay, demands: Backlog, terms: AllTerms
) -> None:
    overdue = [
        m for m, d in in_need(stay, demands).items()
        if not d.slots and d.oldest_s >= terms[m].max_wait_s
    ]  # fmt: skip
    if overdue and late(stay, terms):
        swap = choose(stay, demands, terms)
        assert swap is not None
        # It goes to one of them, or to one that comes before them.
        first = demands[swap.model]
        assert swap.model in overdue or first.slack_s < math.inf or first.online_s is not None


@drawn
@given(STAYS, ALL_DEMANDS, ALL_TERMS)
def test_a_worker_without_work_takes_work_that_no_worker_has(
    stay: Stay, demands: Backlog, terms: AllTerms
) -> None:
    idle = Stay(stay.model, stay.seconds, False, stay.slots)
    unserved = [m for m, d in in_need(idle, demands).items() if not d.slots]
    if unserved and late(idle, terms):
        assert choose(idle, demands, terms) is not None


@drawn
@given(st.lists(st.integers(1, 64), min_size=2, max_size=6), st.integers(1, 300), ALL_TERMS)
def test_workers_without_work_join_a_queue_only_while_requests_wait_beyond_their_slots(
    slots: list[int], requests: int, terms: AllTerms
) -> None:
    """Each worker decides with the claims of those before it, as the claim's script makes sure."""
    joined = 0
    for own in slots:
        demands = {"a": Demand(), "b": Demand(requests, requests * 100.0, slots=joined)}
        swap = choose(Stay("a", 1e4, False, own), demands, terms)
        assert (swap is None) == (0 < requests <= joined) or terms["b"].slot_rate
        joined += own if swap else 0


@drawn
@given(ALL_DEMANDS, ALL_TERMS, st.integers(1, 256), st.integers(0, 256))
def test_no_worker_moves_to_and_fro_for_the_same_backlog(
    demands: Backlog, terms: AllTerms, slots: int, stay_slots: int
) -> None:
    """A move that only balances queues is not undone: the gain of the way back is too small."""
    quiet = {
        m: Demand(d.requests, d.tokens, slots=d.slots) for m, d in demands.items()
    }  # fmt: skip
    terms = {m: Terms(t.swap_s, 0.0, math.inf, math.inf, t.slot_rate) for m, t in terms.items()}
    quiet["a"] = Demand(max(1, quiet["a"].requests), quiet["a"].tokens, slots=stay_slots)
    swap = choose(Stay("a", 1e4, True, slots), quiet, terms)
    if swap is not None:
        back = choose(Stay(swap.model, 1e4, True, slots), quiet, terms)
        assert back is None or back.model != "a"


def calm(demand: Demand, **more: Any) -> Demand:
    """Return the demand without a reason to hurry."""
    return replace(demand, **({"oldest_s": 0.0, "online_s": None, "slack_s": math.inf} | more))


@drawn
@given(STAYS, ALL_DEMANDS, ALL_TERMS, st.sampled_from([0.25, 4.0]))
def test_weights_count_only_relative_to_each_other(
    stay: Stay, demands: Backlog, terms: AllTerms, factor: float
) -> None:
    more = {m: replace(d, weight=d.weight * factor) for m, d in demands.items()}
    assert choose(stay, demands, terms) == choose(stay, more, terms)


@drawn
@given(ALL_DEMANDS, ALL_TERMS, st.integers(1, 256))
def test_a_model_with_work_leaves_only_for_tenants_that_are_a_stay_behind(
    demands: Backlog, terms: AllTerms, slots: int
) -> None:
    """If no other worker serves its queue, so that no move balances the two."""
    quiet = {m: calm(d, slots=0) for m, d in demands.items()}
    swap = choose(Stay("a", 1e4, True, slots), quiet, terms)
    own, limits = quiet["a"], terms["a"]
    stay_s = max(limits.min_stay_s, STAY_FOR_SWAP * limits.swap_s)
    step = slots * limits.slot_rate * stay_s
    behind = [
        m for m, d in quiet.items()
        if m != "a" and d.requests and d.due and own.due and 0 < step < own.served - d.served
    ]  # fmt: skip
    assert (swap is None) == (not behind)
    if swap is not None:
        assert quiet[swap.model].served == min(quiet[m].served for m in behind)


@drawn
@given(ALL_DEMANDS, ALL_TERMS, st.integers(1, 256))
def test_no_worker_leaves_a_queue_with_less_than_its_part_to_balance(
    demands: Backlog, terms: AllTerms, slots: int
) -> None:
    even = {m: calm(d, served=0.0) for m, d in demands.items()}
    if choose(Stay("a", 1e4, True, slots), even, terms) is not None:
        assert even["a"].slots >= even["a"].due * (slots + sum(d.slots for d in even.values()))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(2, 5), st.data())
def test_no_queue_of_a_fleet_starves_and_swaps_are_bounded(
    workers: int, count: int, data: st.DataObject
) -> None:
    """Queues that always have work: each request waits max_wait, then stays and swaps of others."""
    names = MODELS[:count]
    terms = {
        m: Terms(data.draw(st.sampled_from([1.0, 5.0, 30.0])),
                 data.draw(st.sampled_from([10.0, 60.0, 200.0])),
                 data.draw(st.sampled_from([50.0, 600.0]))) for m in names
    }  # fmt: skip
    fleet = Fleet(workers, terms)
    worst = fleet.run(8_000)
    for name, waited in worst.items():
        others = [t for m, t in terms.items() if m != name]
        stays = sum(t.min_stay_s + t.swap_s + 2 for t in others) + terms[name].swap_s + 2
        assert waited <= terms[name].max_wait_s + stays, (name, waited)
    for model, seconds in fleet.stays:
        assert seconds >= terms[model].min_stay_s


class Fleet:
    """Workers that decide once a second, and queues of endless work; a queue's age counts from
    when the last worker left it."""

    def __init__(self, workers: int, terms: AllTerms) -> None:
        self._terms = terms
        #: Of each worker: the model, and when it is or was loaded.
        self._loaded: list[tuple[str | None, float]] = [(None, 0.0)] * workers
        self._left = dict.fromkeys(terms, 0.0)
        self.stays: list[tuple[str, float]] = []

    def run(self, seconds: int) -> dict[str, float]:
        """Return the longest wait of each queue."""
        worst = dict.fromkeys(self._terms, 0.0)
        for now in range(seconds):
            for number in range(len(self._loaded)):
                self._decide(number, float(now))
            for model in self._terms:
                if any(m == model and since <= now for m, since in self._loaded):
                    self._left[model] = float(now)
                worst[model] = max(worst[model], now - self._left[model])
        return worst

    def _decide(self, number: int, now: float) -> None:
        model, since = self._loaded[number]
        if since > now:
            return
        others = [m for n, (m, _) in enumerate(self._loaded) if n != number]
        demands = {
            m: Demand(1000, 1e5, now - self._left[m], slots=16 * others.count(m))
            for m in self._terms
        }  # fmt: skip
        swap: Swap | None = choose(Stay(model, now - since, True, 16), demands, self._terms)
        if swap is not None:
            if model is not None:
                self.stays.append((model, now - since))
            self._loaded[number] = swap.model, now + self._terms[swap.model].swap_s
