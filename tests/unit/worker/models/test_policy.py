"""Which model a worker loads next."""

from __future__ import annotations

import math
import random

import pytest

from worker.models.policy import GAIN, Demand, Stay, Swap, Terms, choose, default_stay_s

TERMS = {name: Terms(swap_s=2.0, min_stay_s=60.0) for name in ("a", "b", "c")}
BUSY = Stay("a", seconds=100.0, has_work=True, slots=10)
IDLE = Stay("a", seconds=100.0, has_work=False, slots=10)


def chosen(stay: Stay, **demands: Demand) -> str | None:
    swap = choose(stay, demands, TERMS)
    return swap.model if swap else None


def test_the_first_model_is_that_with_most_tokens() -> None:
    stay = Stay(None, slots=10)
    assert chosen(stay, a=Demand(5, 500), b=Demand(9, 900), c=Demand()) == "b"


def test_nothing_is_loaded_while_nothing_waits() -> None:
    assert chosen(Stay(None), a=Demand(), b=Demand()) is None


def test_a_model_with_work_stays_while_no_queue_is_overdue() -> None:
    assert chosen(BUSY, a=Demand(1, 10), b=Demand(1000, 1e6, oldest_s=599)) is None


@pytest.mark.parametrize(("demand", "why"), [
    (Demand(1, 10, oldest_s=600), "waits 600 s"),
    (Demand(1, 10, online_s=30, oldest_s=30), "online"),
    (Demand(1, 10, slack_s=1.5), "deadline"),
])  # fmt: skip
def test_what_displaces_a_model_with_work(demand: Demand, why: str) -> None:
    demands = {"a": Demand(10, 100), "b": demand}
    swap = choose(BUSY, demands, TERMS)
    assert isinstance(swap, Swap)
    assert swap.model == "b"
    assert why in swap.reason
    early = Stay("a", seconds=59.9, has_work=True, slots=10)
    assert choose(early, demands, TERMS) is None


def test_deadlines_come_before_online_requests_before_old_ones() -> None:
    old, online = Demand(1, 10, oldest_s=9e3), Demand(1, 10, oldest_s=40, online_s=40)
    deadline = Demand(1, 10, slack_s=0)
    assert chosen(BUSY, a=Demand(), b=old, c=online) == "c"
    assert chosen(BUSY, a=Demand(), b=deadline, c=online) == "b"
    # The deadline that is nearest, the request that has waited the longest beyond its limit.
    assert chosen(BUSY, b=Demand(1, 1, slack_s=1), c=Demand(1, 1, slack_s=-5)) == "c"
    assert chosen(BUSY, b=Demand(1, 1, oldest_s=700), c=Demand(1, 1, oldest_s=900)) == "c"


def test_a_worker_without_work_takes_what_waits_after_a_pause() -> None:
    waits = Demand(3, 300)
    assert chosen(IDLE, b=waits) == "b"
    assert chosen(Stay("a", seconds=1.9), b=waits) is None  # a swap of 2 s
    assert chosen(IDLE, b=waits, c=Demand(1, 1, online_s=0.5)) == "c"


def test_tokens_count_for_each_slot_of_the_fleet() -> None:
    # 90 other slots serve b, so that each of its slots has less to do than one of c would.
    assert chosen(IDLE, b=Demand(200, 5000, slots=90), c=Demand(6, 600)) == "c"


def test_a_queue_whose_workers_take_all_its_requests_needs_no_further_worker() -> None:
    assert chosen(IDLE, b=Demand(50, 5000, slots=64)) is None
    late = Demand(50, 5000, slots=64, oldest_s=1e4, online_s=1e4, slack_s=-1)
    assert chosen(BUSY, a=Demand(1, 1), b=late) is None


def test_a_worker_does_not_join_a_queue_that_is_nearly_empty() -> None:
    terms = {m: Terms(2.0, 60.0, slot_rate=10.0) for m in "ab"}
    for tokens, joins in ((10_000, None), (20_000, "b")):  # 64 slots need 15.6 s, 31 s
        swap = choose(IDLE, {"b": Demand(500, tokens, slots=64)}, terms)
        assert (swap and swap.model) == joins


def test_a_worker_without_work_joins_a_short_queue_for_a_deadline() -> None:
    terms = {m: Terms(2.0, 60.0, slot_rate=10.0) for m in "ab"}
    for demand in (Demand(70, 700, slots=64, slack_s=0), Demand(70, 700, slots=64, online_s=31)):
        swap = choose(IDLE, {"b": demand}, terms)
        assert swap and swap.model == "b"


def test_a_worker_moves_to_a_longer_queue_if_others_keep_its_own() -> None:
    own = Demand(400, 40_000, slots=10)  # 4000 tokens a slot when this worker has left
    assert chosen(BUSY, a=own, b=Demand(1000, 100_000, slots=10)) == "b"  # 10,000 → 5,000 a slot
    assert chosen(BUSY, a=own, b=Demand(500, 50_000, slots=10)) is None  # 5,000 → 4,000
    assert chosen(BUSY, a=Demand(400, 40_000), b=Demand(1000, 100_000, slots=10)) is None


def test_a_move_back_does_not_follow() -> None:
    # After a move the gain of the move back is below GAIN: workers do not swap to and fro.
    rng = random.Random(3)
    for _ in range(2000):
        own, other = rng.uniform(1, 1e6), rng.uniform(1, 1e6)
        n_own, n_other = rng.randint(1, 9), rng.randint(0, 9)
        if chosen(BUSY, a=Demand(999, own, slots=10 * n_own),
                  b=Demand(999, other, slots=10 * n_other)) == "b":  # fmt: skip
            moved = Stay("b", seconds=100.0, has_work=True, slots=10)
            back = choose(moved, {"b": Demand(999, other, slots=10 * n_other),
                                  "a": Demand(999, own, slots=10 * n_own)}, TERMS)  # fmt: skip
            assert back is None
    assert GAIN > 1


def test_the_default_stay_loses_at_most_a_twentieth() -> None:
    assert default_stay_s(1.0) == 60.0
    assert default_stay_s(60.0) == 1200.0


def test_with_one_model_nothing_is_ever_swapped() -> None:
    for seconds in (0.0, 1e6):
        for demand in (Demand(), Demand(10, 100, 1e6, 1e6, -1e6)):
            assert choose(Stay("a", seconds, True), {"a": demand}, TERMS) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_queue_starves_and_swaps_are_bounded(seed: int) -> None:
    """One worker, queues that always or sometimes have work, random terms, an hour and more."""
    rng = random.Random(seed)
    models = [f"m{n}" for n in range(rng.randint(2, 6))]
    choice = rng.choice
    terms = {m: Terms(choice([1.0, 5.0, 30.0]), choice([20.0, 60.0, 200.0]),
                      choice([100.0, 600.0]), choice([5.0, 30.0])) for m in models}  # fmt: skip
    steady = {m: rng.random() < 0.6 for m in models}
    oldest: dict[str, float | None] = dict.fromkeys(models)
    loaded: str | None = None
    since, swaps, worst = 0.0, 0, dict.fromkeys(models, 0.0)
    stays: list[tuple[str, float, bool]] = []
    now = 0.0
    while now < 20_000:
        for m in models:
            if oldest[m] is None and (steady[m] or rng.random() < 0.002):
                oldest[m] = now
            if oldest[m] is not None and m != loaded:
                worst[m] = max(worst[m], now - oldest[m])
        demands = {m: Demand(10, rng.uniform(1, 1e5), now - at) if (at := oldest[m]) is not None
                   else Demand() for m in models}  # fmt: skip
        has_work = loaded is not None and oldest[loaded] is not None
        swap = choose(Stay(loaded, now - since, has_work), demands, terms)
        if swap:
            if loaded is not None:
                stays.append((loaded, now - since, has_work))
                swaps += 1
            now += terms[swap.model].swap_s
            loaded, since = swap.model, now
        if loaded is not None:  # what was oldest is computed; a steady queue goes on
            oldest[loaded] = now if steady[loaded] else None
        now += 1.0
    assert swaps > 3
    for model, seconds, had_work in stays:
        assert seconds >= (terms[model].min_stay_s if had_work else terms[model].pause_s)
    longest = sum(t.min_stay_s + t.swap_s + 2 for t in terms.values())
    for m in models:
        assert worst[m] <= terms[m].max_wait_s + longest, (m, worst, terms)
    assert not math.isnan(now)
