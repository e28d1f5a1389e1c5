"""Sixteen workers and twelve models: the policy beside a static placement and eager swaps."""

from __future__ import annotations

import pytest
from kit.drain.fleet_simulation import Figures, compared

HOURS = 3


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    return compared(swap_s=30, hours=HOURS, seed=1)


def test_requests_wait_less_than_with_a_static_placement(figures: dict[str, Figures]) -> None:
    assert figures["backlog"].p95_s <= 0.5 * figures["static"].p95_s


def test_little_time_is_lost_to_swaps(figures: dict[str, Figures]) -> None:
    assert 0 < figures["backlog"].lost <= 0.05
    assert figures["backlog"].lost < figures["each arrival"].lost
