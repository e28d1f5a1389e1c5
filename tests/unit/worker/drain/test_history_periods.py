"""When a worker writes its counts into its queue's history."""

from __future__ import annotations

import itertools

import pytest

from worker.drain import progress


@pytest.mark.parametrize("first", [0.0, 0.35, 0.999])
def test_the_last_write_of_a_minute_is_in_its_last_second(
    monkeypatch: pytest.MonkeyPatch, first: float
) -> None:
    now = first
    monkeypatch.setattr(progress.time, "time", lambda: now)
    period, writes = progress._period(), []
    for now in itertools.takewhile(lambda at: at < 600, itertools.count(first, 1.002)):
        if period != (period := progress._period()):
            writes.append(now)
    assert len(writes) == 60
    lasts = [max(each) for _, each in itertools.groupby(writes, lambda at: at // 60)]
    assert all(last % 60 >= 58.9 for last in lasts)
