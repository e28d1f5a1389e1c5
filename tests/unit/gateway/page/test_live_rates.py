"""The rates of living workers on open pages, from what they announce."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from gateway.page import live
from gateway.page.live import LiveFeed
from producer import rates


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    now = {"s": 0.0}
    monkeypatch.setattr(live.time, "monotonic", lambda: now["s"])
    return now


def done(answers: int) -> dict[str, int]:
    return {"completed": answers, "prompt_tokens": answers * 4, "completion_tokens": answers * 2}


def read(feed: LiveFeed, clock: dict[str, float], **totals: int) -> dict[str, float | None]:
    """Add a read a second later, with the answers of each worker."""
    clock["s"] += 1.0
    return feed._fleet_rates({worker: done(answers) for worker, answers in totals.items()})


def new_feed() -> LiveFeed:
    services: Any = None
    return LiveFeed(services)


def test_a_worker_that_takes_the_place_of_a_dead_one_has_its_rate(clock: dict[str, float]) -> None:
    feed = new_feed()
    for _ in range(8):
        assert read(feed, clock, dead=9000)["requests_s"] in (None, 0.0)
    # Its first seconds are too few for a rate.
    rates = [read(feed, clock, new=100 + 200 * second)["requests_s"] for second in range(5)]
    assert rates == [None, None, None, 200.0, 200.0]
    assert feed._worker_rate("new") == 400.0
    assert feed._worker_rate("dead") is None


def test_a_worker_that_is_added_adds_its_rate(clock: dict[str, float]) -> None:
    feed = new_feed()
    for second in range(8):
        rates = read(feed, clock, old=100 * second)
    assert rates["requests_s"] == 100.0
    for second in range(8, 12):
        rates = read(feed, clock, old=100 * second, new=5000 + 50 * second)
        assert rates["requests_s"] is not None
        assert 100.0 <= rates["requests_s"] <= 150.0  # its answers before are not counted
    assert rates["requests_s"] == 150.0
    assert rates["out_s"] == 300.0


def test_without_a_worker_nothing_is_written(clock: dict[str, float]) -> None:
    feed = new_feed()
    for _ in range(5):
        rates = read(feed, clock)
    assert rates["out_s"] == 0.0


def test_a_batch_that_is_retried_has_the_rate_of_the_time_since_then(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read of the ended batch is in the rate."""
    monkeypatch.setattr(rates.time, "monotonic", lambda: clock["s"])
    feed, row = new_feed(), dict[str, Any]()
    monkeypatch.setattr(live.BatchViews, "using", lambda _: SimpleNamespace(get=lambda *_: row))
    monkeypatch.setattr(live, "row_of", lambda found, _: dict(found))
    monkeypatch.setattr(feed, "_services", SimpleNamespace(batches=None))
    monkeypatch.setattr(feed, "_estimates", lambda *_: {})

    def shown(second: float, done: int, *, ended: bool = False) -> Any:
        clock["s"] = second
        row.update(
            dict.fromkeys(("works", "submitted", "parts", "failures", "rate")),
            ended=ended, done=done, seconds=second,
        )  # fmt: skip
        (read,) = feed._read_batches([("t", "b1")]).values()
        return orjson.loads(read)["rate"]

    assert [shown(n, 100 * n) for n in range(5)] == [None, None, None, 100.0, 100.0]
    assert shown(5, 500, ended=True) is None
    assert [shown(6 + n, 500 + 10 * n) for n in range(4)] == [None, None, None, 10.0]
