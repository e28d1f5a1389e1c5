"""What online requests of one gateway process work with; made with its event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.background import background
from gateway.online.models import Models
from gateway.online.revoked import Revocations
from gateway.online.waiting import Waiting
from gateway.redis.api_keys import KeyLookup
from gateway.redis.live import LiveRequests
from gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Online:
    """The requests that wait, the models that are served, the keys of what runs, how long to wait,
    in seconds."""

    waiting: Waiting
    models: Models
    revocations: Revocations
    timeout_s: float


@asynccontextmanager
async def online(settings: GatewaySettings, lookup: KeyLookup) -> AsyncIterator[Online]:
    """Hear of results as long as the block runs."""
    redis = LiveRequests(settings.redis_url.get_secret_value(), "warmq-gateway-online")
    waiting = Waiting(redis, settings)
    models = Models(redis, settings.queue, settings.gateway_models)
    revocations = Revocations(lookup)
    try:
        async with background(waiting.run, revocations.run):
            try:
                yield Online(waiting, models, revocations, settings.gateway_online_timeout_s)
            finally:
                await waiting.close()
    finally:
        await redis.close()
