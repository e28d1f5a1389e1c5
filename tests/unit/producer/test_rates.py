"""Rates of running batches: means over the last half minute."""

from __future__ import annotations

import pytest

from producer import rates
from producer.rates import Window


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    now = {"s": 0.0}
    monkeypatch.setattr(rates.time, "monotonic", lambda: now["s"])
    return now


def test_rates_are_means_over_the_last_half_minute(clock: dict[str, float]) -> None:
    window = Window()
    assert window.add(0, 0) == [0.0, 0.0]
    clock["s"] = 10.0
    assert window.add(100, 1000) == [10.0, 100.0]
    clock["s"] = 40.0
    # What happened before 10.0 no longer counts.
    assert window.add(100, 1000) == [0.0, 0.0]
    assert window.span == 30.0


def test_a_retry_that_takes_results_back_gives_no_negative_rate(clock: dict[str, float]) -> None:
    window = Window()
    window.add(100)
    clock["s"] = 1.0
    assert window.add(50) == [0.0]


def read_each(clock: dict[str, float], window: Window, seconds: range, first: int) -> float:
    """Read 100 requests a second from `first` on, each half second; return the last value."""
    for half in range(2 * len(seconds)):
        clock["s"] = seconds[0] + half / 2
        (rate,) = window.add(first + 50 * half)
    return rate


def test_a_time_without_reads_is_not_in_a_rate(clock: dict[str, float]) -> None:
    window = Window()
    read_each(clock, window, range(10), 0)
    # Redis is away for 20 s, and the workers come back 3 s after it.
    for clock["s"] in (30.0, 31.0, 32.0):
        assert window.add(1000) == [0.0]
        assert window.span == 0.0
    assert read_each(clock, window, range(33, 38), 1050) == 100.0
    assert window.span == 4.5


def test_after_a_time_without_reads_a_batch_that_stands_still_has_a_rate_of_0(
    clock: dict[str, float],
) -> None:
    window = Window()
    read_each(clock, window, range(10), 0)
    for clock["s"] in (30.0, 80.0):
        assert window.add(1000) == [0.0]
        assert window.span == 0.0
    clock["s"] = 81.0
    assert window.add(1000) == [0.0]
    assert window.span == 1.0


def test_rare_reads_are_not_a_time_without_reads(clock: dict[str, float]) -> None:
    window = Window()
    for read in range(4):  # many viewers take turns
        clock["s"] = 10.0 * read
        (rate,) = window.add(100 * read)
    assert rate == 10.0
