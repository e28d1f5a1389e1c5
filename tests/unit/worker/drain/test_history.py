"""What a worker writes into its queue's history, and when."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from worker.drain import progress
from worker.drain.counts import Counts
from worker.drain.events import EngineReady, Events


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
    assert len(writes) == pytest.approx(600 / progress.WRITE_S, abs=1)
    lasts = [max(each) for _, each in itertools.groupby(writes, lambda at: at // 60)]
    assert all(last % 60 >= 58.9 for last in lasts)


def test_seconds_before_the_first_answer_of_an_engine_are_not_counted_as_work() -> None:
    # An engine compiles at its first requests: the rate of the history would be too low for long
    events = Events()
    counts = Counts(events)
    drain: Any = SimpleNamespace(
        events=events, counts=counts, limits=SimpleNamespace(slots=32), in_flight=range(20),
        averages=Mock(), supervisor=SimpleNamespace(cached_prompt_tokens=lambda: 0),
    )  # fmt: skip
    history = progress.History(drain)
    for completed, engine_starts, busy_s in (
        (0, False, 0), (0, False, 0), (20, False, 20), (20, False, 40), (20, True, 40),
        (21, False, 60),
    ):  # fmt: skip
        counts.completed = completed
        if engine_starts:
            events.publish(EngineReady(1.0, Mock(), rebuilt=True))
        history.sample(1.0)
        assert history._busy_s == busy_s
    assert history._slots_s == 6 * 32
