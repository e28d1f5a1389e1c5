"""A day of a bad server in front of many lines, on a simulated clock."""

from __future__ import annotations

import pytest
from kit.servers.bad_day import TRIES_A_LINE, BadDay


@pytest.mark.parametrize("seed", [0, 1])
def test_a_day_of_a_bad_server_loses_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = BadDay(seed, 12_000).run(monkeypatch)
    assert found["answered"] + found["at_fault"] == found["lines"]
    assert (found["lost"], found["deaths"]) == (0, 0)
    assert found["tries_a_line"] <= TRIES_A_LINE
