"""The page's lines over time."""

from __future__ import annotations

from contract.redis.ring import DAY, Minute
from gateway.page.fleet import filled, rates


def day(began: int) -> list[Minute]:
    """Return a day whose first slots were there in so manyeth a minute."""
    return [Minute(n, completion_tokens=60 * (n >= began), slots_s=n >= began) for n in range(DAY)]


def test_a_line_begins_when_there_were_slots_but_an_hour_ago_at_the_latest():
    assert (rates(day(0)).from_s, rates(day(0)).to_s) == (0, 60 * (DAY - 2))
    assert rates(day(1000)).from_s == 60 * 1000
    assert rates(day(1000)).mean == 1.0
    assert rates(day(DAY - 5)).from_s == 60 * (DAY - 61)
    assert rates(day(DAY)).most == 0


def test_a_young_ring_is_shown_as_it_is():
    young = [Minute(7, 1, 0, 10, 120, 0, 30, 60)]
    assert rates(young).most == 2.0
    assert filled(young).most == 0.5
