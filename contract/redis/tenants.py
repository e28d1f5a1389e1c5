"""Tenants: their share of the fleet, what they have waiting and in flight."""

from collections.abc import Iterable
from dataclasses import dataclass

from contract import naming
from contract.redis import keys
from contract.redis.reads import Reads


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's terms: its share of tokens is proportional to `weight`; at most `max_in_flight`
    of its requests run at a time in each queue (None: as many as there are slots)."""

    name: str
    weight: float = 1.0
    max_in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """Requests of a tenant in one queue."""

    waiting: int = 0
    in_flight: int = 0


class Tenants(Reads):
    """Tenants of one Redis. Each call raises StoreUnavailable where it cannot be used."""

    def tenants(self) -> list[Tenant]:
        """Return the tenants that have terms of their own, by name."""
        found = sorted(self._client.hgetall(keys.TENANTS).items())
        return [_tenant(name.decode(), terms.decode()) for name, terms in found]

    def tenant(self, name: str) -> Tenant:
        """Return a tenant's terms, those of everybody if it has none of its own."""
        terms = self._client.hget(keys.TENANTS, name)
        return _tenant(name, terms.decode()) if terms else Tenant(name)

    def set_tenant(self, tenant: Tenant) -> None:
        """Give a tenant its terms; what waits already is served by them, within a second."""
        cap = "" if tenant.max_in_flight is None else tenant.max_in_flight
        self._run("terms_put", keys.TENANTS, tenant.name, f"{tenant.weight:g}\0{cap}")

    def delete_tenant(self, name: str) -> bool:
        """Give a tenant everybody's terms again; return whether it had its own."""
        return bool(self._client.hdel(keys.TENANTS, name))

    def tenant_loads(self, queue: str) -> dict[str, TenantLoad]:
        """Return what each tenant of a queue has waiting and in flight, by name."""
        lists = self.turns(queue)
        waiting: dict[str, int] = {}
        lengths = self._each("llen", [key for _, _, key in lists])
        for (_, tenant, _), length in zip(lists, lengths, strict=True):
            waiting[tenant] = waiting.get(tenant, 0) + length
        in_flight = self.in_flight_by(queue)
        names = sorted(waiting.keys() | in_flight.keys())
        return {name: TenantLoad(waiting.get(name, 0), in_flight.get(name, 0)) for name in names}

    def in_flight_by(self, queue: str) -> dict[str, int]:
        """Return how many requests of each tenant workers of a queue hold."""
        return {
            field.decode().removeprefix("in_flight:"): int(count)
            for field, count in self._client.hgetall(naming.turns_key(queue)).items()
            if field.startswith(b"in_flight:")
        }

    def used(self, queues: Iterable[str]) -> dict[str, float]:
        """Return the tokens that each tenant had of its answered requests in the last hour; of
        those of the clock's hour before, the share that is left of it."""
        names = list(queues)
        hour, before, left = _hours(self.now_ms())
        raws = self._each("hgetall", [keys.used_key(q, h) for h in (hour, before) for q in names])
        sums: dict[str, float] = {}
        for n, raw in enumerate(raws):
            for tenant, tokens in raw.items():
                found = int(tokens) * (1 if n < len(names) else left)
                sums[tenant.decode()] = sums.get(tenant.decode(), 0) + found
        return sums


def _hours(now_ms: int) -> tuple[int, int, float]:
    """Return this hour since 1970, the one before, and how much of that one is counted: so much
    as is left of this one."""
    hour, past_ms = divmod(now_ms, 3_600_000)
    return hour, hour - 1, 1 - past_ms / 3_600_000


def _tenant(name: str, terms: str) -> Tenant:
    weight, _, cap = terms.partition("\0")
    return Tenant(name, float(weight), int(cap) if cap else None)
