"""Requests at a server that people use start one after another."""

from __future__ import annotations

import asyncio
import time
from typing import Any

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


async def test_many_requests_start_at_the_pace() -> None:
    fleet = servers(PACE_S)
    times = await taken_at(fleet, 10)
    assert times[-1] - times[0] >= 8.5 * PACE_S
    assert fleet.servers[0].in_flight == 10


async def test_a_pause_does_not_let_many_start_at_once() -> None:
    fleet = servers(PACE_S)
    first = (await taken_at(fleet, 1))[0]
    await asyncio.sleep(5 * PACE_S)  # five starts' time
    times = await taken_at(fleet, 5)
    assert times[0] - first >= 5 * PACE_S
    assert times[-1] - times[0] >= 3 * PACE_S


async def test_without_a_pace_all_start_at_once() -> None:
    fleet = servers(0.0)
    times = await taken_at(fleet, 50)
    assert times[-1] - times[0] < 5.0
    assert fleet.servers[0].in_flight == 50
