"""Tenants that wait for different models share the workers by weight."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from worker.models.policy import Demand, Stay, Swap, Terms, choose
from worker.models.shares import Share, Shares

#: Tokens per second of a worker, its slots, and the seconds between two decisions.
RATE, SLOTS, STEP_S = 1600.0, 16, 5.0


class Fleet:
    """Workers, and tenants whose requests never end; `waits` has the models of each tenant."""

    def __init__(self, workers: int, waits: dict[str, str], weights: dict[str, float]) -> None:
        self.waits, self.weights = waits, weights
        self.models = sorted({model for models in waits.values() for model in models})
        self.terms = dict.fromkeys(self.models, Terms(2.0, 60.0, slot_rate=RATE / SLOTS))
        self.served = dict.fromkeys(waits, 0.0)
        self.worst = dict.fromkeys(self.models, 0.0)
        self.swaps: list[tuple[str, float]] = []
        self._shares = [Shares() for _ in range(workers)]
        self._new = [dict.fromkeys(waits, 0.0) for _ in range(workers)]
        self._loaded: list[tuple[str | None, float]] = [(None, 0.0)] * workers
        self._left = dict.fromkeys(self.models, 0.0)

    def run(self, seconds: float) -> None:
        now = 0.0
        while now < seconds:
            for number, (model, since) in enumerate(self._loaded):
                if since <= now:
                    self._decide(number, model, now - since, now)
            for model, since in self._loaded:
                if model is not None and since <= now:
                    self._serve(model)
                    self._left[model] = now
            for model in self.models:
                self.worst[model] = max(self.worst[model], now - self._left[model])
            now += STEP_S

    def _serve(self, model: str) -> None:
        """Give a step's tokens to the model's tenants, as turns do."""
        tenants = [tenant for tenant, models in self.waits.items() if model in models]
        whole = sum(self.weights[tenant] for tenant in tenants)
        for tenant in tenants:
            tokens = RATE * STEP_S * self.weights[tenant] / whole
            self.served[tenant] += tokens
            for new in self._new:
                new[tenant] += tokens

    def _decide(self, number: int, model: str | None, seconds: float, now: float) -> None:
        waiting = {m: {t: 1e6 for t, models in self.waits.items() if m in models}
                   for m in self.models}  # fmt: skip
        new, self._new[number] = self._new[number], dict.fromkeys(self.waits, 0.0)
        shares = self._shares[number].look(waiting, new, self.weights)
        others = [m for n, (m, _) in enumerate(self._loaded) if n != number]
        demands = {}
        for m in self.models:
            share = shares.get(m, Share())
            demands[m] = Demand(
                10_000, sum(waiting[m].values()), now - self._left[m], None, math.inf,
                SLOTS * others.count(m), share.weight, share.served, share.due,
            )  # fmt: skip
        swap: Swap | None = choose(Stay(model, seconds, True, SLOTS), demands, self.terms)
        if swap is not None:
            if model is not None:
                self.swaps.append((model, seconds))
            self._loaded[number] = swap.model, now + self.terms[swap.model].swap_s


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_tenant_with_weight_3_gets_three_times_the_tokens_over_all_models(workers: int) -> None:
    fleet = Fleet(workers, {"x": "a", "y": "b"}, {"x": 3.0, "y": 1.0})
    fleet.run(20_000)
    assert fleet.served["x"] / fleet.served["y"] == pytest.approx(3.0, rel=0.1)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=4))
def test_tenants_of_different_models_are_served_by_weight(
    workers: int, weights: list[float]
) -> None:
    names = "abcd"[: len(weights)]
    fleet = Fleet(workers, dict(zip(names, names, strict=True)),
                  dict(zip(names, weights, strict=True)))  # fmt: skip
    fleet.run(20_000)
    served = [fleet.served[name] / fleet.weights[name] for name in names]
    if workers < len(names):  # else some tenant has a worker of its own at any time
        assert max(served) <= 1.25 * min(served), (fleet.served, weights)
    for model, seconds in fleet.swaps:
        assert seconds >= fleet.terms[model].min_stay_s
    longest = sum(t.min_stay_s + t.swap_s + 2 * STEP_S for t in fleet.terms.values())
    assert max(fleet.worst.values()) <= 600.0 + longest


def test_a_tenant_of_both_models_is_served_no_more_than_its_weight() -> None:
    fleet = Fleet(1, {"x": "ab", "y": "b"}, {"x": 3.0, "y": 1.0})
    fleet.run(20_000)
    # Model `a` is loaded for a stay when its requests have waited for max_wait: 1 of 11 minutes.
    assert 3.0 <= fleet.served["x"] / fleet.served["y"] <= 4.0


def test_a_weight_does_not_let_another_tenant_starve() -> None:
    fleet = Fleet(1, {"x": "a", "y": "b"}, {"x": 1000.0, "y": 1.0})
    fleet.run(20_000)
    assert fleet.worst["b"] <= 600.0 + 60.0 + 2 * STEP_S
    assert fleet.served["x"] > 8 * fleet.served["y"]


def test_one_tenant_has_no_shares() -> None:
    shares = Shares()
    for _ in range(3):
        assert shares.look({"a": {"x": 5.0}, "b": {"x": 9.0}}, {"x": 1e6}, {"x": 3.0}) == {}
    assert shares.tenants == set()


def test_shares_are_of_weights_and_of_what_waits() -> None:
    found = Shares().look({"a": {"x": 10.0}, "b": {"x": 30.0, "y": 5.0}, "c": {"y": 0.0}}, {},
                          {"x": 3.0})  # fmt: skip
    assert found["a"] == Share(3.0, 0.0, 0.75 / 4)
    assert found["b"].due == pytest.approx(0.75 * 3 / 4 + 0.25)
    assert found["b"].weight == pytest.approx((30 * 3 + 5) / 35)
    assert found["c"] == Share()


def test_a_tenant_that_comes_later_has_no_credit() -> None:
    shares, both = Shares(), {"a": {"x": 1.0}, "b": {"y": 1.0}}
    shares.look(both, {}, {})
    shares.look(both, {"x": 500.0, "y": 500.0}, {})
    three = both | {"c": {"z": 1.0}}
    assert {model: share.served for model, share in shares.look(three, {}, {}).items()} == {
        "a": 0.0, "b": 0.0, "c": 0.0,
    }  # fmt: skip


def test_a_tenant_that_was_served_more_returns_with_its_counter() -> None:
    shares, both = Shares(), {"a": {"x": 1.0}, "b": {"y": 1.0}}
    shares.look(both, {}, {})
    assert shares.look(both, {"x": 900.0}, {})["a"].served == 1800.0  # half of the weights
    assert shares.look({"b": {"y": 1.0}}, {"y": 100.0}, {}) == {}
    assert shares.tenants == {"x", "y"}
    assert shares.look(both, {"y": 100.0}, {})["a"].served == 1400.0
    assert shares.look({"b": {"y": 1.0}}, {"y": 900.0}, {}) == {}
    assert shares.tenants == set()  # nothing of x is remembered: it was served less


WEIGHTS = st.floats(0.001, 1000)
TENANTS = st.dictionaries(st.sampled_from("xyz"), st.floats(0, 1e6), max_size=3)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.fixed_dictionaries(dict.fromkeys("abc", TENANTS)), min_size=1, max_size=5),
    TENANTS, st.dictionaries(st.sampled_from("xyz"), WEIGHTS, max_size=3),
)  # fmt: skip
@example([{"a": {}, "b": {}, "c": {"x": 1.0, "y": 5e-324}}], {}, {})
def test_the_parts_of_all_models_are_one(
    looks: list[dict[str, dict[str, float]]], served: dict[str, float], weights: dict[str, float]
) -> None:
    shares = Shares()
    for waiting in looks:
        found = shares.look(waiting, served, weights)
        waits = {t for each in waiting.values() for t, tokens in each.items() if tokens}
        assert bool(found) == (len(waits) > 1)
        if found:
            assert math.isclose(sum(share.due for share in found.values()), 1.0, rel_tol=1e-6)
            assert min(share.served for share in found.values()) >= 0.0
            assert min(share.served for share in found.values() if share.due) == 0.0
