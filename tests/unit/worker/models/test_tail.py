"""How long a swap waits for running requests: never at much more cost than the cheaper way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.models.tail import Tail

SLOTS = 16
LOOK_S = 0.05
#: What each running request has run, and still needs, in looks.
REQUESTS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 400)), min_size=1, max_size=SLOTS
)  # fmt: skip


def request(since: float, *, attempt: int = 1, listener: str = "") -> Any:
    delivery = SimpleNamespace(attempt=attempt, listener=listener)
    return SimpleNamespace(since=since, ended=False, delivery=delivery)


def run(requests: list[tuple[int, int]], **more: Any) -> tuple[int, float, float]:
    """Return the looks until the end, the idle slot-seconds, and the lost ones."""
    start = 1000.0
    running = [(request(start - ran * LOOK_S, **more), needs) for ran, needs in requests]
    tail = Tail(SLOTS, start)
    for look in range(1, 10_000):
        now = start + look * LOOK_S
        left = [one for one, needs in running if needs > look]
        if tail.look(left, now):
            return look, tail.idle_s, sum(now - one.since for one in left)
        if not left:
            return look, tail.idle_s, 0.0
    raise AssertionError("no end")


@given(REQUESTS)
def test_the_cost_is_at_most_twice_that_of_waiting(requests: list[tuple[int, int]]) -> None:
    _, idle_s, lost_s = run(requests)
    waiting, all_idle_s, none_lost_s = run(requests, attempt=2)
    assert none_lost_s == 0 and waiting == max(needs for _, needs in requests)
    assert idle_s + lost_s <= 2 * all_idle_s + 1e-6


@given(REQUESTS)
def test_nothing_is_handed_back_while_all_slots_run(requests: list[tuple[int, int]]) -> None:
    full = [requests[n % len(requests)] for n in range(SLOTS)]
    looks, _, lost_s = run(full)
    assert not lost_s or looks > min(needs for _, needs in full)


def test_one_long_request_among_idle_slots_is_handed_back_soon() -> None:
    looks, _, lost_s = run([(20, 10_000 - 1)])
    assert looks <= 3 and 1.0 <= lost_s <= 1.2


@pytest.mark.parametrize("more", [{"attempt": 2}, {"listener": "l"}])
def test_some_requests_are_waited_for(more: dict[str, Any]) -> None:
    assert run([(0, 500)], **more)[0] == 500
