"""Of how many requests Celery's tools are told."""

from __future__ import annotations

import pytest

from contract.message import Delivery
from worker.drain.events import Events, Leased, LeasesLost, Started
from worker.telemetry import task_events
from worker.telemetry.task_events import BURST_S, MOST_WAITING, TaskEvents


def delivery(request_id: str) -> Delivery:
    return Delivery(
        f"w/{request_id}", request_id, "warmq.generate", "", "", "", 0, None, None, None, None,
        False, {}, {},
    )  # fmt: skip


def told_of(events: Events, gathered: TaskEvents, names: str, count: int) -> int:
    """Lease and start so many requests; return of how many something was told."""
    taken = [delivery(f"{names}{n}") for n in range(count)]
    events.publish(Leased(taken, 0.0))
    for one in taken:
        events.publish(Started(one))
    kinds = [one["type"] for one in gathered.take()]
    assert kinds.count("task-received") == kinds.count("task-started")
    return kinds.count("task-received")


def test_above_the_rate_whole_requests_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(task_events.time, "monotonic", lambda: clock[0])
    events = Events()
    gathered = TaskEvents(events, most_per_s=3)
    gathered.switch(True)
    assert told_of(events, gathered, "a", 100) == 3 * BURST_S
    clock[0] += 2
    assert told_of(events, gathered, "b", 100) == 6


def test_nothing_is_subscribed_while_nobody_asks() -> None:
    events = Events()
    gathered = TaskEvents(events, most_per_s=3)
    assert events.subscribers(Leased) == ()
    gathered.switch(True)
    gathered.switch(False)
    assert events.subscribers(Leased) == events.subscribers(Started) == ()


def test_a_lost_lease_is_told_of_no_more() -> None:
    events = Events()
    gathered = TaskEvents(events, most_per_s=3)
    gathered.switch(True)
    events.publish(Leased([delivery("a")], 0.0))
    events.publish(LeasesLost([delivery("a")]))
    events.publish(Started(delivery("a")))
    assert [one["type"] for one in gathered.take()] == ["task-received"]


def test_events_that_nobody_sends_are_bounded() -> None:
    events = Events()
    gathered = TaskEvents(events, most_per_s=10_000)
    gathered.switch(True)
    for _ in range(3):
        events.publish(Leased([delivery(f"{n}") for n in range(MOST_WAITING)], 0.0))
    assert len(gathered.take()) == MOST_WAITING
