"""Deadlines: which batches run first, which cannot be met; alone, by brute force, simulated."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from kit.drain.deadline_simulation import Batch, Simulation

from contract.deadlines import Order, Queued, Terms, _moore_hodgson, _Share, order

RATE, OF_SLOT = 80.0, 10.0


def queued(key: str, tokens: float, left_s: float | None, **more: Any) -> Queued:
    return Queued(key, 6, "t", tokens, 10.0, left_s)._replace(**more)


def ordered(*lists: Queued, **tenants: Terms) -> Order:
    return order(lists, RATE, OF_SLOT, tenants, 0.0)


# -- one call ------------------------------------------------------------------------------------


def test_without_deadlines_and_with_far_ones_turns_hold() -> None:
    assert ordered() == ordered(queued("a", 8000, None)) == Order()
    assert ordered(queued("a", 8000, 1000.0), queued("b", 8000, None)) == Order()
    assert order([queued("a", 8000, 1.0)], 0.0, 0.0, {}, 0.0) == Order()


def test_a_batch_that_must_begin_now_comes_first() -> None:
    assert ordered(queued("a", 8000, 105.0), queued("b", 8000, None)).urgent == ("a",)


def test_a_later_deadline_makes_an_earlier_one_urgent_and_not_what_comes_after_it() -> None:
    lists = [queued("b", 8000, 210.0), queued("a", 8000, 150.0), queued("c", 80, 9000.0)]
    assert ordered(*lists).urgent == ("a", "b")


def test_one_that_no_order_can_save_is_late_and_does_not_ruin_the_rest() -> None:
    found = ordered(queued("hopeless", 80_000, 50.0), queued("a", 3000, 40.0))
    assert found.urgent == ("a",)
    assert set(found.late) == {"hopeless"}
    late = found.late["hopeless"]
    assert late.late_s == pytest.approx(1000 - 50 + 3000 / 80, abs=1)
    assert late.factor == pytest.approx((late.late_s + 50) / 50)


def test_one_that_misses_by_little_runs_behind_those_that_are_met() -> None:
    found = ordered(queued("close", 8000, 95.0), queued("a", 4400, 60.0))
    assert found.urgent == ("a", "close")


def test_what_is_above_comes_before_and_expired_requests_take_no_time() -> None:
    above = queued("above", 8000, None, step=3, tenant="u")
    assert ordered(queued("a", 8000, 250.0)).urgent == ()
    assert ordered(queued("a", 8000, 220.0), above).urgent == ("a",)
    assert ordered(queued("a", 8000, -1.0), queued("b", 8000, None)) == Order()


def test_a_tenant_gets_its_share_and_no_more_than_its_cap() -> None:
    own, other = queued("a", 4000, 110.0), queued("x", 80_000, None, tenant="u")
    assert ordered(own).urgent == ()
    assert ordered(own, other).urgent == ("a",)
    assert ordered(own, other, t=Terms(weight=9.0)).urgent == ()
    assert set(ordered(own, other, t=Terms(weight=0.1)).late) == {"a"}
    assert set(ordered(own, t=Terms(cap=1)).late) == {"a"}
    assert ordered(own, t=Terms(cap=0)) == Order()


def test_a_deadline_is_possible_if_a_request_and_the_tenant_s_cap_leave_time() -> None:
    def late(**more: Any) -> Any:
        terms = {"t": more.pop("terms")} if "terms" in more else {}
        return ordered(queued("a", 8000, **{"left_s": 10.0} | more), **terms).late["a"]

    assert late().possible  # on 80 slots, which 800 requests fill
    assert late().factor == pytest.approx(10)
    assert not late(left_s=0.9).possible  # one request takes 1 s
    assert not late(each=200.0).possible
    assert not late(terms=Terms(cap=79)).possible
    assert late(terms=Terms(cap=80)).possible


# -- properties ----------------------------------------------------------------------------------

AMOUNTS = st.floats(1, 1e6)
DUE = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 150)), min_size=1, max_size=7)


@given(st.lists(st.tuples(AMOUNTS, st.floats(0.01, 100)), max_size=5), st.floats(0, 1e5), AMOUNTS)
def test_tokens_until_a_time_and_the_time_of_tokens_are_inverse(
    others: list[tuple[float, float]], above: float, tokens: float
) -> None:
    share = _Share(RATE, above, others, RATE)
    assert share.until(share.seconds(tokens)) == pytest.approx(tokens, rel=1e-6)


@given(DUE)
def test_no_other_set_meets_more_deadlines(pairs: list[tuple[int, int]]) -> None:
    due = sorted(
        (queued(str(n), tokens, float(room)) for n, (tokens, room) in enumerate(pairs)),
        key=lambda one: one.left_s or 0.0,
    )
    room = {one.key: one.left_s or 0.0 for one in due}
    met, dropped = _moore_hodgson(due, room)
    assert sorted(one.key for one in met + dropped) == sorted(room)

    def can_be_met(some: tuple[Queued, ...]) -> bool:
        ends = itertools.accumulate(one.tokens for one in some)
        return all(end <= room[one.key] for end, one in zip(ends, some, strict=True))

    assert can_be_met(tuple(met))
    most = max(
        n for n in range(len(due) + 1) if any(map(can_be_met, itertools.combinations(due, n)))
    )
    assert len(met) == most


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 3, 6]), st.sampled_from("tuv"), st.floats(0, 1e5),
            st.floats(0.1, 1e3), st.none() | st.floats(-100, 1e5),
        ),
        max_size=12,
    ),
    st.dictionaries(
        st.sampled_from("tuv"),
        st.builds(Terms, st.floats(0.01, 100), st.sampled_from([0.0, 1.0, 5.0, math.inf])),
    ),
)  # fmt: skip
def test_any_queue_has_an_order(
    rows: list[tuple[int, str, float, float, float | None]], tenants: dict[str, Terms]
) -> None:
    lists = [Queued(str(n), *row) for n, row in enumerate(rows)]
    found = order(lists, RATE, OF_SLOT, tenants, 3.0)
    of_key = {one.key: one for one in lists}
    assert len(set(found.urgent)) == len(found.urgent)
    for key in (*found.urgent, *found.late):
        assert (of_key[key].left_s or 0) > 0
    for late in found.late.values():
        assert 0 < late.late_s < math.inf
        assert late.factor > 1


# -- simulated -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [0.92, 1.0, 1.08])
def test_each_deadline_that_can_be_met_is_met_and_the_hopeless_one_is_named_at_once(
    error: float,
) -> None:
    batches = [
        Batch("nightly", 2000, 20.0),  # no deadline
        Batch("noon", 800, 20.0, 500.0),
        Batch("soon", 400, 20.0, 240.0, comes_s=60.0),
        Batch("hopeless", 4000, 20.0, 300.0, comes_s=30.0),
    ]
    run = Simulation(batches, error=error).run()
    assert {one.name: one.met for one in batches} == {
        "nightly": True, "noon": True, "soon": True, "hopeless": False,
    }  # fmt: skip
    assert set(run.named_s) == {"hopeless"}
    assert run.named_s["hopeless"] <= 30.0 + 10.0


def test_turns_alone_miss_what_the_order_meets() -> None:
    def met(*, ordered: bool) -> list[bool]:
        batches = [Batch("a", 800, 20.0, 270.0), Batch("b", 2000, 20.0)]
        Simulation(batches, ordered=ordered).run()
        return [one.met for one in batches]

    assert met(ordered=False) == [False, True]
    assert met(ordered=True) == [True, True]


def test_the_turns_of_tenants_hold_whatever_their_deadlines_are() -> None:
    terms = {"v": Terms(weight=2.0)}
    batches = [
        Batch("late", 4000, 20.0, 100.0),
        Batch("due", 900, 20.0, 1000.0),
        Batch("u", 3000, 20.0, tenant="u"),
        Batch("v", 3000, 20.0, tenant="v"),
    ]
    run = Simulation(batches, terms=terms).run()
    shares = {name: run.served[name] / run.served.total() for name in "tuv"}
    assert shares == pytest.approx({"t": 0.25, "u": 0.25, "v": 0.5}, abs=0.02)
    assert batches[1].met
    assert run.named_s["late"] == 0.0


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from([10.0, 20.0, 40.0]), st.floats(1.4, 4)),
        min_size=1, max_size=5,
    ),
    st.integers(0, 2000),
)  # fmt: skip
def test_deadlines_with_a_reserve_are_met(
    rows: list[tuple[int, float, float]], others: int
) -> None:
    """Each deadline is that of an order with some reserve, so all can be met."""
    batches, tokens = [Batch("other", others, 20.0)], 0.0
    for number, (requests, each, reserve) in enumerate(rows):
        tokens += requests * each
        # The engine takes a request of 40 tokens for 4 s, and the order is read every 3 s.
        batches.append(Batch(f"b{number}", requests, each, reserve * tokens / RATE + 20.0))
    Simulation(batches).run()
    assert [one.name for one in batches if not one.met] == []
