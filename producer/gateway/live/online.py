"""What online requests of one gateway process work with; made with its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from contract.redis.gateway.live import LiveRequests
from producer.gateway.live.models import Models
from producer.gateway.live.waiting import Waiting
from producer.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Online:
    """The requests that wait, the models that are served, how long to wait, in seconds."""

    waiting: Waiting
    models: Models
    timeout_s: float


@asynccontextmanager
async def online(settings: GatewaySettings) -> AsyncIterator[Online]:
    """Hear of results as long as the block runs."""
    redis = LiveRequests(settings.redis_url.get_secret_value(), "warmq-gateway-online")
    waiting = Waiting(redis, settings)
    models = Models(redis, settings.queue, settings.gateway_models)
    hearing = asyncio.create_task(waiting.run())
    try:
        yield Online(waiting, models, settings.gateway_online_timeout_s)
    finally:
        await waiting.close()
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await redis.close()
