"""Time left: tokens left by the tokens of the last minutes with work."""

from __future__ import annotations

import pytest

from contract.redis.history import Minute
from producer.time_left import MINUTES, pace_of, seconds_left


def minute(number: int, tokens: int, busy_s: int = 120, slots_s: int = 240) -> Minute:
    return Minute(number, 1, 0, tokens // 2, tokens - tokens // 2, 0, busy_s, slots_s)


def test_the_latest_minutes_with_work_count_and_idle_ones_do_not() -> None:
    old = [minute(n, 999) for n in range(3)]
    worked = [minute(10 + n, 1200) for n in range(MINUTES)]
    found = pace_of([*old, *worked, Minute(20), minute(21, 0)])
    assert found is not None
    assert (found.of_slot, found.slots, found.tokens_per_s) == (10.0, 4.0, 40.0)


def test_the_slots_that_there_are_now_count() -> None:
    found = pace_of([minute(1, 1200)], slots=8)
    assert found is not None
    assert found.tokens_per_s == 80.0


def test_without_work_there_is_no_pace() -> None:
    assert pace_of([]) is None
    assert pace_of([Minute(1, slots_s=60), minute(2, 0)]) is None


@pytest.mark.parametrize(
    ("total", "done", "tokens", "seconds"),
    [
        (110, 10, 400, 100.0),  # 100 requests of 40 tokens, by 40 a second
        (12, 10, 400, 4.0),  # 2 requests use 2 of the 4 slots
        (10, 10, 400, 0.0),
        (10, 0, 0, None),
        (10, 5, 0, None),
    ],
)
def test_the_rest_takes_as_the_requests_that_are_done(
    total: int, done: int, tokens: int, seconds: float | None
) -> None:
    assert seconds_left(pace_of([minute(1, 1200)]), total, done, tokens) == seconds


def test_nobody_knows_without_a_pace() -> None:
    assert seconds_left(None, 10, 5, 100) is None
