"""Reads and writes tenants' weights and caps; reads their requests waiting and in flight."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from contract import naming
from contract.redis import keys
from contract.redis.reads import Reads


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's weight in the share of tokens, and its cap: sequences in flight per queue."""

    name: str
    weight: float = 1.0
    max_in_flight: int | None = None


class TenantLoad(NamedTuple):
    """The number of a tenant's waiting requests, and of its sequences in flight, in one queue."""

    waiting: int = 0
    in_flight: int = 0


class Tenants(Reads):
    """Reads and writes tenants. Each call raises StoreUnavailable if Redis cannot be used."""

    def tenants(self) -> list[Tenant]:
        """Return the tenants that were given a weight or a cap, sorted by name."""
        found = sorted(self._client.hgetall(keys.TENANTS).items())
        return [_tenant(name.decode(), stored.decode()) for name, stored in found]

    def tenant(self, name: str) -> Tenant:
        """Return a tenant with its weight and cap, or with the defaults."""
        stored = self._client.hget(keys.TENANTS, name)
        return _tenant(name, stored.decode()) if stored else Tenant(name)

    def set_tenant(self, tenant: Tenant) -> None:
        """Write a tenant's weight and cap; within a second they apply to requests that wait."""
        cap = "" if tenant.max_in_flight is None else tenant.max_in_flight
        self._run("terms_put", keys.TENANTS, tenant.name, f"{tenant.weight:g}\0{cap}")

    def delete_tenant(self, name: str) -> bool:
        """Remove a tenant's weight and cap: the defaults apply; return whether it had any."""
        return bool(self._client.hdel(keys.TENANTS, name))

    def tenant_loads(self, queue: str) -> dict[str, TenantLoad]:
        """Return the load of each tenant of a queue, by name."""
        lists = self.turns(queue)
        waiting = Counter[str]()
        lengths = self._each("llen", [key for _, _, key in lists])
        for (_, tenant, _), length in zip(lists, lengths, strict=True):
            waiting[tenant] += length
        in_flight = self.in_flight_by(queue)
        names = sorted(waiting.keys() | in_flight.keys())
        return {name: TenantLoad(waiting[name], in_flight.get(name, 0)) for name in names}

    def in_flight_by(self, queue: str) -> dict[str, int]:
        """Return the number of each tenant's sequences in flight in a queue's workers."""
        return {
            field.decode().removeprefix("in_flight:"): int(count)
            for field, count in self._client.hgetall(naming.turns_key(queue)).items()
            if field.startswith(b"in_flight:")
        }

    def used(self, queues: Iterable[str]) -> dict[str, float]:
        """Return each tenant's tokens of the last 60 minutes, an estimate.

        Redis has sums of whole hours: the previous hour counts in proportion to its overlap.
        """
        names = list(queues)
        hour, past_ms = divmod(self.now_ms(), 3_600_000)
        overlap = 1 - past_ms / 3_600_000
        hours = [(hour, 1.0), (hour - 1, overlap)]
        raws = self._each("hgetall", [keys.used_key(q, h) for h, _ in hours for q in names])
        sums: dict[str, float] = {}
        for raw, part in zip(raws, (part for _, part in hours for _ in names), strict=True):
            for tenant, tokens in raw.items():
                sums[tenant.decode()] = sums.get(tenant.decode(), 0) + int(tokens) * part
        return sums


def _tenant(name: str, stored: str) -> Tenant:
    weight, _, cap = stored.partition("\0")
    return Tenant(name, float(weight), int(cap) if cap else None)
