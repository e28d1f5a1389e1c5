"""How much a worker takes at once."""

from __future__ import annotations

import pytest

from worker.drain.room import Room
from worker.engine import Capacity, places_of_many
from worker.settings import WorkerSettings


def room(*, one_step: bool, **given: int) -> Room:
    settings = WorkerSettings(redis_url="redis://x", **given)
    return Room.of(Capacity(256, 1024, "m", one_step=one_step), settings)


def test_a_quarter_of_the_slots_waits_where_requests_end_one_by_one() -> None:
    assert room(one_step=False) == Room(256, 320, 32, 1024)


def test_two_steps_wait_where_all_slots_are_free_at_once() -> None:
    assert room(one_step=True) == Room(256, 768, 256, 1024)


@pytest.mark.parametrize("one_step", [False, True])
def test_what_is_set_holds_for_both(one_step: bool) -> None:
    assert room(one_step=one_step, look_ahead=16).limit == 272


@pytest.mark.parametrize(("slots", "places"), [(1, 1), (2, 1), (4, 3), (32, 30), (256, 240)])
def test_requests_of_many_sequences_leave_slots_to_others(slots: int, places: int) -> None:
    assert places_of_many(slots) == places
    assert Room(slots, slots + 8).slots_of_many == places


def test_a_quarter_of_those_that_wait_may_be_of_many_sequences() -> None:
    assert room(one_step=False).many_waiting == 16
    assert Room(32, 32).many_waiting == 1
