"""Pace: tokens per second of the minutes with work, on the slots of now."""

from __future__ import annotations

import pytest

from contract.redis.history import Minute
from contract.redis.pace import MINUTES, pace_of, slots_of


def minute(number: int, tokens: int, busy_s: int = 120, slots_s: int = 240) -> Minute:
    return Minute(number, 1, 0, tokens // 2, tokens - tokens // 2, 0, busy_s, slots_s)


def test_the_latest_minutes_with_work_count_and_idle_ones_do_not() -> None:
    old = [minute(n, 999) for n in range(3)]
    worked = [minute(10 + n, 1200) for n in range(MINUTES)]
    found = pace_of([*old, *worked, Minute(20), minute(21, 0)])
    assert found is not None
    assert (found.of_slot, found.slots, found.tokens_per_s) == (10.0, 4.0, 40.0)
    assert found.of_request == 1200


def test_the_slots_that_there_are_now_count() -> None:
    found = pace_of([minute(1, 1200)], slots=8)
    assert found is not None
    assert found.tokens_per_s == 80.0


def test_slots_of_workers_that_run_nothing_do_not_count() -> None:
    states = ("ready", "degraded", "draining")
    assert slots_of([{"state": state, "slots": 4} for state in states] + [{"slots": None}]) == 4


def test_without_work_there_is_no_pace() -> None:
    assert pace_of([]) is None
    assert pace_of([Minute(1, slots_s=60), minute(2, 0)]) is None


@pytest.mark.parametrize(("minutes", "rough"), [(29, True), (30, False)])
def test_a_pace_of_few_requests_is_rough(minutes: int, rough: bool) -> None:
    found = pace_of([minute(1, 1200)._replace(completed=minutes)])
    assert found is not None
    assert (found.requests, found.rough) == (minutes, rough)


def test_no_older_minutes_count_than_are_enough_for_a_rate() -> None:
    slow = [minute(n, 120)._replace(completed=60) for n in range(4)]
    quick = minute(9, 12_000)._replace(completed=60)
    for latest, of_slot in (
        (quick, 100.0),
        (quick._replace(completed=11), 50.5),  # not three requests of each slot
        (quick._replace(slots_s=119), 50.5),  # not half a minute
    ):
        found = pace_of([*slow, latest], slots=4)
        assert found is not None
        assert found.of_slot == pytest.approx(of_slot)
