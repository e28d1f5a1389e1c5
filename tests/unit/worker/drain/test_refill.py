"""When the drain asks Redis for more: rarely for batches, soon where people wait."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest

from contract.message import Delivery, MessageWriter, read_delivery, write_online
from worker.drain import refill
from worker.drain.admission import AdmissionLimits
from worker.drain.refill import ONLINE_FOR_S, QUICK_S, Refill

BATCH = read_delivery(
    "w/1", MessageWriter("b", 1, "l", "warmq", 0).write("i", "c", 1, "/v1", b"{}")
)
#: 256 slots and a look-ahead of 64.
LIMITS = AdmissionLimits(256, 320, 32, 8, context=1024)
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
    assert [when.next_pop(free, LIMITS).pause_s for free in (-3, 0, 1, 31)] == [math.inf] * 4
    assert [when.next_pop(free, LIMITS) for free in (32, 40)] == [(32, 0), (40, 0)]


def end(when: Refill, clock: Clock, many: int) -> None:
    """Let so many requests a second end for some seconds, one after the other."""
    for _ in range(many * 6):
        when.next_pop(1, LIMITS)
        when.next_pop(0, LIMITS)
        clock.now += 1 / many


def test_after_an_online_request_batches_leave_places_free_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, when = asked(monkeypatch, BATCH)
    end(when, clock, 200)
    when.asked([ONLINE])
    assert when.next_pop(9, LIMITS) == (1, pytest.approx(QUICK_S))
    assert when.next_pop(40, LIMITS) == (32, 0)
    assert [when.next_pop(free, LIMITS).pause_s for free in (0, 8)] == [math.inf] * 2
    clock.now += QUICK_S + 0.001
    assert when.next_pop(9, LIMITS) == (1, 0)
    when.asked([BATCH])
    assert when.next_pop(9, LIMITS) == (1, pytest.approx(QUICK_S))
    clock.now += ONLINE_FOR_S + 1
    assert when.next_pop(9, LIMITS).pause_s == math.inf
    assert when.next_pop(32, LIMITS) == (32, 0)


@pytest.mark.parametrize(("many", "one_step", "reserved"), [
    (70, False, 64 + 2), (150, False, 64 + 2), (170, False, 8), (70, True, 8),
])  # fmt: skip
def test_where_few_requests_end_batches_leave_slots_free(
    monkeypatch: pytest.MonkeyPatch, many: int, one_step: bool, reserved: int
) -> None:
    clock, when = asked(monkeypatch, BATCH)
    end(when, clock, many)
    limits = dataclasses.replace(LIMITS, one_step=one_step)
    when.asked([ONLINE])
    clock.now += QUICK_S + 0.001
    assert when.next_pop(reserved, limits).pause_s == math.inf
    assert when.next_pop(reserved + 1, limits) == (1, 0)


def test_answers_that_end_together_are_few_if_they_are_few_on_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, when = asked(monkeypatch, BATCH)
    when.asked([ONLINE])
    for _ in range(4):  # 254 end in one step, every 6 s
        assert when.next_pop(320, LIMITS) == (254, 0)
        when.asked([BATCH])
        for _ in range(5):
            clock.now += 1.2
            assert when.next_pop(66, LIMITS).pause_s == math.inf


async def test_an_online_request_that_arrives_is_taken_immediately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, when = asked(monkeypatch, BATCH)
    end(when, clock, 200)
    when.asked([BATCH])
    arrived = asyncio.create_task(when.online_arrived())
    await asyncio.sleep(0)
    assert [when.next_pop(free, LIMITS).pause_s for free in (-1, 0)] == [math.inf] * 2
    assert when.next_pop(1, LIMITS) == (1, 0)
    when.asked([ONLINE])  # perhaps there are more, which get the reserved places, too
    assert when.next_pop(1, LIMITS) == (1, 0)
    assert when.next_pop(12, LIMITS) == (4, 0)
    when.asked([BATCH])
    await asyncio.wait_for(arrived, 5)
    assert when.next_pop(1, LIMITS).pause_s == math.inf
