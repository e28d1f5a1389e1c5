"""A task that speaks to Redis ends when it is cancelled, once, at whichever moment."""

from __future__ import annotations

import asyncio

from gateway.redis.online import OnlineRequests

#: Moments at which it is cancelled, and how far apart: from before it connects until it listens.
MOMENTS, APART_S = 60, 0.0001


async def test_any_command_raises_the_cancellation_of_its_task(redis_url: str) -> None:
    for moment in range(MOMENTS):
        redis = OnlineRequests.open(redis_url, "test")

        async def ask(redis: OnlineRequests = redis) -> None:
            while True:
                await redis.workers()

        asking = asyncio.create_task(ask())
        await asyncio.sleep(moment * APART_S)
        asking.cancel()
        done, _ = await asyncio.wait([asking], timeout=2)
        assert done, moment
        await redis.close()
