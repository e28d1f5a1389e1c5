"""Holds the state of one process's online requests, which is made with its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from contract.errors import WarmqError
from gateway.background import background
from gateway.http.errors import ApiError
from gateway.online.models import Models
from gateway.online.pending import PendingRequests, Waiter
from gateway.redis.api_keys import KeyLookup
from gateway.redis.online import OnlineRequests
from gateway.settings import GatewaySettings

#: Seconds between two checks of the keys of running requests.
CHECK_S = 2.0


class Revocations:
    """Ends online requests whose key is revoked; all keys are looked up in one call."""

    def __init__(self, lookup: KeyLookup) -> None:
        self._lookup = lookup
        self._waiters: dict[str, set[Waiter]] = {}

    def add(self, digest: str, waiter: Waiter) -> None:
        """End a request if the key with this digest is revoked before `remove` is called."""
        self._waiters.setdefault(digest, set()).add(waiter)

    def remove(self, digest: str, waiter: Waiter) -> None:
        """Stop watching the key for this request."""
        waiters = self._waiters[digest]
        waiters.remove(waiter)
        if not waiters:
            del self._waiters[digest]

    async def run(self) -> None:
        """Check keys until cancelled. While Redis is unreachable no key counts as revoked."""
        while True:
            await asyncio.sleep(CHECK_S)
            digests = [*self._waiters]
            if not digests:
                continue
            try:
                keys = await self._lookup.find(digests)
            except WarmqError:
                continue
            for digest, one in zip(digests, keys, strict=True):
                if one.key is None or one.key.revoked_at is not None:
                    for waiter in tuple(self._waiters.get(digest, ())):
                        waiter.end(_revoked())


def _revoked() -> ApiError:
    message = "the key was revoked while its request ran, and the request was aborted"
    kind = "invalid_request_error"
    return ApiError(401, message, code="invalid_api_key", type=kind, retry=False)


@dataclass(frozen=True, slots=True)
class OnlineState:
    """The state of online requests; `timeout_s` is how long a caller waits for an answer."""

    pending: PendingRequests
    models: Models
    revocations: Revocations
    timeout_s: float


@asynccontextmanager
async def online_state(settings: GatewaySettings, lookup: KeyLookup) -> AsyncIterator[OnlineState]:
    """Provide the state, and receive results as long as the context is open."""
    redis = OnlineRequests.open(settings.redis_url.get_secret_value(), "warmq-gateway-online")
    pending = PendingRequests(redis, settings)
    models = Models(
        redis, settings.queue, settings.gateway_models, settings.gateway_not_loaded == "refuse"
    )
    revocations = Revocations(lookup)
    try:
        async with background(pending.run, revocations.run):
            try:
                yield OnlineState(pending, models, revocations, settings.gateway_online_timeout_s)
            finally:
                await pending.close()
    finally:
        await redis.close()
