"""Rates of running batches: means over the last half minute, known well enough or not."""

from __future__ import annotations

import pytest

from producer import rates
from producer.rates import ROUNDS, Recent, Window


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    now = {"s": 0.0}
    monkeypatch.setattr(rates.time, "monotonic", lambda: now["s"])
    return now


def test_rates_are_means_over_the_last_half_minute(clock: dict[str, float]) -> None:
    window = Window()
    assert window.add(0, 0) == [Recent(0, 0.0), Recent(0, 0.0)]
    clock["s"] = 10.0
    assert window.add(100, 1000) == [Recent(100, 10.0), Recent(1000, 100.0)]
    clock["s"] = 40.0
    # What happened before 10.0 no longer counts.
    assert window.add(100, 1000) == [Recent(0, 0.0, 30.0), Recent(0, 0.0, 30.0)]
    assert window.span == 30.0


def test_a_retry_that_takes_results_back_gives_no_negative_rate(clock: dict[str, float]) -> None:
    window = Window()
    window.add(100)
    clock["s"] = 1.0
    assert window.add(50) == [Recent(0, 0.0)]


def test_a_rate_gives_a_time_left_once_each_slot_has_ended_several_requests() -> None:
    assert Recent(ROUNDS * 8, 4.0).seconds_left(100, 8) == 25.0
    # 8 requests that began together may also end together: that is no rate yet.
    assert Recent(8, 4.0).seconds_left(100, 8) is None
    assert Recent(0, 0.0).seconds_left(100, 0) is None


def test_a_rate_over_a_time_without_a_worker_gives_no_time_left(clock: dict[str, float]) -> None:
    window = Window()
    for second in range(31):
        clock["s"] = float(second)
        done = 200 * (second if second < 5 else max(4, second - 16))  # none ends from 5 to 20
        (recent,) = window.add(done)
        if second == 4:
            assert (recent.pause_s, recent.seconds_left(1000, 64)) == (0.0, 5.0)
    assert (recent.pause_s, recent.seconds_left(1000, 64)) == (16.0, None)
    # Once the pause has left the window, the rate counts again.
    for second in range(31, 55):
        clock["s"] = float(second)
        (recent,) = window.add(200 * (second - 16))
    assert (recent.pause_s, recent.seconds_left(1000, 64)) == (0.0, 5.0)


def test_slots_that_end_together_make_no_pause() -> None:
    # 8 slots with requests of 9 s
    assert Recent(24, 0.9, 9.0).seconds_left(90, 8) == 100.0
    assert Recent(24, 0.9, 20.0).seconds_left(90, 8) is None


def read_each(clock: dict[str, float], window: Window, seconds: range, first: int) -> Recent:
    """Read 100 requests a second from `first` on, each half second; return the last value."""
    for half in range(2 * len(seconds)):
        clock["s"] = seconds[0] + half / 2
        (recent,) = window.add(first + 50 * half)
    return recent


def test_a_time_without_reads_is_not_in_a_rate(clock: dict[str, float]) -> None:
    window = Window()
    read_each(clock, window, range(10), 0)
    # Redis is away for 20 s, and the workers come back 3 s after it.
    for clock["s"] in (30.0, 31.0, 32.0):
        assert window.add(1000) == [Recent(0, 0.0)]
        assert window.span == 0.0
    recent = read_each(clock, window, range(33, 38), 1050)
    assert (recent.per_s, recent.seconds_left(1000, 64)) == (100.0, 10.0)
    assert window.span == 4.5


def test_after_a_time_without_reads_a_batch_that_stands_still_has_a_rate_of_0(
    clock: dict[str, float],
) -> None:
    window = Window()
    read_each(clock, window, range(10), 0)
    for clock["s"] in (30.0, 80.0):
        assert window.add(1000) == [Recent(0, 0.0)]
        assert window.span == 0.0
    clock["s"] = 81.0
    assert window.add(1000) == [Recent(0, 0.0, 1.0)]
    assert window.span == 1.0


def test_rare_reads_are_not_a_time_without_reads(clock: dict[str, float]) -> None:
    window = Window()
    for read in range(4):  # many viewers take turns
        clock["s"] = 10.0 * read
        (recent,) = window.add(100 * read)
    assert recent.per_s == 10.0
