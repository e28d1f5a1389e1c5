"""Models that are loaded together count as one where the worker decides what it loads."""

from __future__ import annotations

import math
from typing import Any

from worker.models.companions import Companions, merge
from worker.models.policy import Demand


def companions(**loaded_with: str) -> Companions:
    models: Any = dict.fromkeys("abcd")

    async def run(*_: object) -> None:
        raise AssertionError

    return Companions(models, loaded_with, run)


def test_what_waits_for_one_of_them_counts_for_all() -> None:
    found = merge([
        Demand(3, 100.0, 5.0, None, math.inf, 4), Demand(2, 50.0, 9.0, 1.5, 60.0, 2),
    ])  # fmt: skip
    assert found == Demand(5, 150.0, 9.0, 1.5, 60.0, 6)
    assert merge([]) == Demand()
    found = merge([
        Demand(3, 100.0, weight=3.0, served=7.0, due=0.2), Demand(),
        Demand(2, 300.0, served=5.0, due=0.5),
    ])  # fmt: skip
    assert (found.weight, found.served, found.due) == (1.5, 5.0, 0.7)


def test_the_worker_swaps_between_the_main_models() -> None:
    on = companions(b="a", d="a")
    assert on.main_models() == ["a", "c"]
    assert on.members("a") == ["a", "b", "d"] and on.members("c") == ["c"]
    demands = {name: Demand(requests=n) for n, name in enumerate("abcd")}
    assert {m: d.requests for m, d in on.merged(demands).items()} == {"a": 4, "c": 2}
