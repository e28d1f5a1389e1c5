"""What the routes of a gateway work with; made once in each process."""

from __future__ import annotations

from dataclasses import dataclass

from contract.redis.batches import BatchStore
from contract.redis.gateway.api_keys import ApiKeys, KeyLookup
from contract.redis.gateway.clock import Clock
from contract.redis.gateway.due import Due
from contract.redis.gateway.idempotency import Tries
from contract.redis.gateway.limits import Budgets, Rates
from contract.redis.gateway.objects import Objects
from contract.redis.gateway.records import Records
from contract.redis.gateway.sessions import Sessions
from producer.gateway.limits import Limits
from producer.gateway.settings import GatewaySettings
from producer.gateway.store import Store, open_store


@dataclass(frozen=True, slots=True)
class Services:
    """One process' connections; all are safe to use from several threads.

    `lookup`, `tries`, `rates` and `sessions` are for the event loop alone; they connect when first
    used.
    """

    settings: GatewaySettings
    batches: BatchStore
    clock: Clock
    objects: Objects
    records: Records
    due: Due
    keys: ApiKeys
    limits: Limits
    store: Store
    lookup: KeyLookup
    tries: Tries
    rates: Rates
    sessions: Sessions

    @classmethod
    def open(cls, settings: GatewaySettings, name: str = "warmq-gateway") -> Services:
        """Connect.

        Raises:
            StoreUnavailable: Redis does not answer.
            StoreFailed: files cannot be kept where the settings say.
        """
        url = settings.redis_url.get_secret_value()
        batches = BatchStore.open(url, name, ttl_ms=settings.result_ttl_ms)
        rates = Rates.open(url, name)
        return cls(
            settings=settings,
            batches=batches,
            clock=Clock(batches),
            objects=Objects.beside(batches),
            records=Records.beside(batches),
            due=Due.beside(batches),
            keys=ApiKeys.beside(batches),
            limits=Limits(rates, Budgets.beside(batches)),
            store=open_store(settings.gateway_store),
            lookup=KeyLookup.open(url, name),
            tries=Tries.open(url, name),
            rates=rates,
            sessions=Sessions.open(url, name),
        )

    async def close_async(self) -> None:
        """Close what the event loop has used, before it ends."""
        for used in (self.lookup, self.tries, self.rates, self.sessions):
            await used.close()

    def close(self) -> None:
        """Close all connections."""
        self.batches.close()
