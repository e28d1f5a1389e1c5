"""What the routes of a gateway work with; made once in each process."""

from __future__ import annotations

from dataclasses import dataclass

from contract.redis.batches import BatchStore
from contract.redis.gateway.due import Due
from contract.redis.gateway.objects import Objects
from producer.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Services:
    """One process' connections; all are safe to use from several threads."""

    settings: GatewaySettings
    batches: BatchStore
    objects: Objects
    due: Due

    @classmethod
    def open(cls, settings: GatewaySettings, name: str = "warmq-gateway") -> Services:
        """Connect.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        url = settings.redis_url.get_secret_value()
        batches = BatchStore.open(url, name, ttl_ms=settings.result_ttl_ms)
        return cls(settings, batches, Objects.beside(batches), Due.beside(batches))

    def close(self) -> None:
        """Close all connections."""
        self.batches.close()
