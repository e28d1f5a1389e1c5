"""The age of a worker's announcement."""

from __future__ import annotations

import pytest

from contract.redis.announcements import is_alive, read_announcements


@pytest.mark.parametrize(
    ("age_s", "overdue", "alive"),
    [(0, False, True), (2, False, True), (3, True, True), (14, True, True), (16, True, False),
     (-10, False, True)],  # Redis's clock has stepped back
)  # fmt: skip
def test_an_announcement_is_overdue_long_before_its_worker_counts_as_dead(
    age_s: int, overdue: bool, alive: bool
) -> None:
    raw = b'%d\0{"queue":"warmq","state":"ready"}' % ((100 - age_s) * 1000)
    (worker,) = read_announcements({b"w": raw}, 100)
    assert (worker["overdue"], is_alive(worker)) == (overdue, alive)
