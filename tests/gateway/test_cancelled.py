"""A task that speaks to Redis ends when it is cancelled, once, at whichever moment."""

from __future__ import annotations

import asyncio

from gateway.online.waiting import Waiting
from gateway.redis.live import LiveRequests
from gateway.settings import GatewaySettings

#: Moments at which it is cancelled, and how far apart: from before it connects until it listens.
MOMENTS, APART_S = 60, 0.0001


async def test_hearing_ends_when_it_is_cancelled_while_it_connects(redis_url: str) -> None:
    settings = GatewaySettings(redis_url=redis_url)  # type: ignore[arg-type]
    went_on = []
    for moment in range(MOMENTS):
        redis = LiveRequests(redis_url, "test")
        hearing = asyncio.create_task(Waiting(redis, settings).run())
        await asyncio.sleep(moment * APART_S)  # not a synchronisation: any moment will do
        hearing.cancel()
        await asyncio.wait([hearing], timeout=2)
        if not hearing.done():
            went_on.append(moment)
            hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await redis.close()
    assert not went_on


async def test_any_command_raises_the_cancellation_of_its_task(redis_url: str) -> None:
    for moment in range(MOMENTS):
        redis = LiveRequests(redis_url, "test")

        async def ask(redis: LiveRequests = redis) -> None:
            while True:
                await redis.workers()

        asking = asyncio.create_task(ask())
        await asyncio.sleep(moment * APART_S)
        asking.cancel()
        done, _ = await asyncio.wait([asking], timeout=2)
        assert done, moment
        await redis.close()
