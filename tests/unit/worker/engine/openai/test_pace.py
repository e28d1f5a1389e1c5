"""Requests at a server that people use start one after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import pytest
from kit.drain.simulated_time import run_simulated

from worker.engine.openai.upstream import Upstream
from worker.engine.remote.servers import Servers

PACE_S = 0.02


def servers(pace_s: float) -> Servers[Upstream]:
    session: Any = None
    upstream = Upstream("http://one/v1", session, "m", 100)
    upstream.up, upstream.pace_s = True, pace_s
    fleet = Servers[Upstream](60, None)
    fleet.servers = [upstream]
    fleet._watches = [asyncio.get_running_loop().create_future()]  # type: ignore[list-item]
    return fleet


async def taken_at(fleet: Servers[Upstream], count: int) -> list[float]:
    async def take() -> float:
        await fleet.take()
        return time.monotonic()

    return sorted(await asyncio.gather(*(take() for _ in range(count))))


async def start(count: int, pace_s: float, pause_s: float = 0.0, more: int = 0) -> list[float]:
    """Return the times of `count` starts, and of `more` after a pause, from the first one on."""
    fleet = servers(pace_s)
    times = await taken_at(fleet, count)
    if more:
        await asyncio.sleep(pause_s)
        times += await taken_at(fleet, more)
    assert fleet.servers[0].in_flight == count + more
    return [at - times[0] for at in times]


def gaps(run: Coroutine[Any, Any, list[float]], patch: pytest.MonkeyPatch) -> list[float]:
    """Return the simulated seconds between the starts."""
    times = run_simulated(run, patch)
    return [after - before for before, after in pairwise(times)]


def test_many_requests_start_at_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    between = gaps(start(10, PACE_S), monkeypatch)
    # One late start does not delay the next one: the first was possible long before.
    assert sum(between) == pytest.approx(8 * PACE_S, abs=0.01)
    assert min(a + b for a, b in pairwise(between)) > 0.9 * PACE_S


def test_a_pause_does_not_let_many_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    between = gaps(start(1, PACE_S, 5 * PACE_S, 5), monkeypatch)  # five starts' time
    assert between[0] == pytest.approx(5 * PACE_S)
    assert sum(between[1:]) == pytest.approx(3 * PACE_S, abs=0.01)  # the first is made up for


def test_without_a_pace_all_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gaps(start(50, 0.0), monkeypatch) == [0.0] * 49
