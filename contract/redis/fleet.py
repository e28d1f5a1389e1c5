"""What the whole fleet does, for people who look: bounded reads, however much waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from contract import naming
from contract.redis import keys
from contract.redis.reads import Reads

#: Lists of waiting messages that are looked at in one queue, priority and tenant.
MOST_LISTS = 100


class Waiting(NamedTuple):
    """Requests that wait at one priority for one tenant; '' for plain Celery clients' lists.

    `since_ms` is when the oldest of their batches was created, None if none is of a batch. With
    `more` there are lists beyond those that were counted.
    """

    queue: str
    priority: int
    tenant: str
    requests: int
    since_ms: int | None
    more: bool


class FleetReads(Reads):
    """Reads of one Redis. Each raises StoreUnavailable where it cannot be used."""

    def waiting_totals(self, queues: Iterable[str]) -> dict[str, int]:
        """Return how many requests wait in each queue: one round trip."""
        names = list(queues)
        pipe = self._client.pipeline(transaction=False)
        for queue in names:
            pipe.hget(naming.turns_key(queue), "waiting")
            for key in naming.priority_lists(queue):
                pipe.llen(key)
        replies = pipe.execute() if names else []
        width = 1 + len(naming.PRIORITY_STEPS)
        return {
            queue: sum(int(reply or 0) for reply in replies[n * width : (n + 1) * width])
            for n, queue in enumerate(names)
        }

    def waiting_by(self, queue: str) -> list[Waiting]:
        """Return what waits in a queue by priority and tenant, of MOST_LISTS lists each: four
        round trips."""
        steps = naming.PRIORITY_STEPS
        plain = self._each("llen", naming.priority_lists(queue))
        found = [
            Waiting(queue, step, "", int(count), None, False)
            for step, count in zip(steps, plain, strict=True) if count
        ]  # fmt: skip
        rings = [naming.turns_key(queue, step) for step in steps]
        tenants = [
            (step, f"{ring}\x06{name.decode()}", name.decode())
            for step, ring, names in zip(
                steps, rings, self._each("zrange", rings, 0, MOST_LISTS - 1), strict=True
            )
            for name in names
        ]
        lists = self._each("zrange", [key for _, key, _ in tenants], 0, MOST_LISTS)
        for (step, _, tenant), names in zip(tenants, lists, strict=True):
            found.append(self._counted(queue, step, tenant, [name.decode() for name in names]))
        return [one for one in found if one.requests]

    def in_flight_by(self, queue: str) -> dict[str, int]:
        """Return how many requests of each tenant workers of a queue hold."""
        raw = self._client.hgetall(naming.turns_key(queue))
        return {
            field.decode().removeprefix("in_flight:"): int(count)
            for field, count in raw.items()
            if field.startswith(b"in_flight:")
        }

    def _counted(self, queue: str, step: int, tenant: str, lists: list[str]) -> Waiting:
        more, lists = len(lists) > MOST_LISTS, lists[:MOST_LISTS]
        pipe = self._client.pipeline(transaction=False)
        for key in lists:
            pipe.llen(key)
            pipe.zscore(keys.BATCHES, key.rpartition("\x06")[2])
        replies: list[Any] = pipe.execute() if lists else []
        since = [int(score) for score in replies[1::2] if score is not None]
        count = sum(int(length) for length in replies[::2])
        return Waiting(queue, step, tenant, count, min(since, default=None), more)
