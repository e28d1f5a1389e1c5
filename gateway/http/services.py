"""Holds the connections and settings that a gateway's routes use, once in each process."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from contract.redis.batches import BatchStore
from contract.redis.due import Due
from contract.redis.objects import Objects
from contract.redis.reads import Reads
from contract.redis.records import Records
from gateway.file_store import FileStore, open_store
from gateway.http.limits import Limits
from gateway.redis.api_keys import ApiKeys, KeyLookup, Sessions
from gateway.redis.idempotency import IdempotencyStore
from gateway.redis.limits import Budgets, Rates
from gateway.redis.responses import BackgroundResponses
from gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Services:
    """One process's connections, for several threads.

    `lookup`, `idempotency`, `rates` and `sessions` are only for the event loop, and connect when
    they are first used.
    """

    settings: GatewaySettings
    batches: BatchStore
    clock: Clock
    objects: Objects
    records: Records
    due: Due
    responses: BackgroundResponses
    keys: ApiKeys
    limits: Limits
    store: FileStore
    lookup: KeyLookup
    idempotency: IdempotencyStore
    rates: Rates
    sessions: Sessions

    @classmethod
    def open(cls, settings: GatewaySettings, name: str = "warmq-gateway") -> Services:
        """Connect to Redis and open the store; raise StoreUnavailable or FileStoreFailed."""
        url = settings.redis_url.get_secret_value()
        batches = BatchStore.open(url, name, ttl_ms=settings.result_ttl_ms)
        rates = Rates.open(url, name)
        return cls(
            settings=settings,
            batches=batches,
            clock=Clock(batches),
            objects=Objects.using(batches),
            records=Records.using(batches),
            due=Due.using(batches),
            responses=BackgroundResponses.using(batches),
            keys=ApiKeys.using(batches),
            limits=Limits(rates, Budgets.using(batches)),
            store=open_store(settings.gateway_store),
            lookup=KeyLookup.open(url, name),
            idempotency=IdempotencyStore.open(url, name),
            rates=rates,
            sessions=Sessions.open(url, name),
        )

    async def close_async(self) -> None:
        """Close the event loop's connections before the loop ends."""
        for used in (self.lookup, self.idempotency, self.rates, self.sessions):
            await used.close()

    def close(self) -> None:
        """Close all other connections."""
        self.batches.close()


#: Seconds for which the difference between Redis's clock and this machine's monotonic clock is
#: cached. In that time the clocks drift apart by a millisecond at most.
_CACHED_S = 10.0


class Clock:
    """Returns the time of one Redis. Thread-safe."""

    def __init__(self, redis: Reads) -> None:
        self._redis = redis
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._ahead_s = 0.0

    def now(self) -> float:
        """Return Redis's time in seconds since 1970; raise StoreUnavailable."""
        with self._lock:
            at = time.monotonic()
            if at - self._read_at >= _CACHED_S:
                now_s = self._redis.now_ms() / 1000
                self._read_at = time.monotonic()
                self._ahead_s = now_s - (at + self._read_at) / 2
            return time.monotonic() + self._ahead_s
