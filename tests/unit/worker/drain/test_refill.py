"""When the drain asks Redis for more: rarely for batches, soon where people wait."""

from __future__ import annotations

import math

import pytest

from contract.message import Delivery, MessageWriter, read_delivery, write_online
from worker.drain import refill
from worker.drain.refill import ONLINE_FOR_S, QUICK_S, Refill

BATCH = read_delivery(
    "w/1", MessageWriter("b", 1, "l", "warmq", 0).write("i", "c", 1, "/v1", b"{}")
)
ONLINE = read_delivery(
    "w/2",
    write_online("j", "/v1", b"{}", queue="warmq", priority=0, tenant="t", deadline=1, keep_ms=1),
)


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(refill.time, "monotonic", lambda: self.now)


def asked(monkeypatch: pytest.MonkeyPatch, *deliveries: Delivery) -> tuple[Clock, Refill]:
    clock, when = Clock(monkeypatch), Refill()
    when.asked(deliveries)
    return clock, when


def test_a_batch_waits_until_half_of_the_look_ahead_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, when = asked(monkeypatch, BATCH)
    clock.now += 10
    assert [when.pause_s(free, 32) for free in (-3, 0, 1, 31)] == [math.inf] * 4
    assert when.pause_s(32, 32) == when.pause_s(40, 32) == 0


def test_after_an_online_request_one_free_place_is_enough_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, when = asked(monkeypatch, BATCH, ONLINE)
    assert when.pause_s(1, 32) == pytest.approx(QUICK_S)
    assert when.pause_s(32, 32) == 0
    assert when.pause_s(0, 32) == math.inf
    clock.now += QUICK_S + 0.001
    assert when.pause_s(1, 32) == 0
    when.asked([BATCH])
    assert when.pause_s(1, 32) == pytest.approx(QUICK_S)
    clock.now += ONLINE_FOR_S + 1
    assert when.pause_s(1, 32) == math.inf
