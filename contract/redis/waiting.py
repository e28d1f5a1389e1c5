"""Counts the requests that wait in queues, for people and for metrics."""

from collections.abc import Iterable
from typing import NamedTuple

from contract import naming
from contract.redis import keys
from contract.redis.reads import Reads

#: Most tenants of one queue and priority that are counted, and most lists of each tenant.
MAX_LISTS = 100


class Waiting(NamedTuple):
    """The number of requests that wait for a tenant, at one priority of a queue.

    `tenant` is '' for kombu's lists. `since_ms` is the creation of the oldest batch among them.
    `more`: the tenant has more lists than were counted.
    """

    queue: str
    priority: int
    tenant: str
    requests: int
    since_ms: int | None
    more: bool


class WaitingList(NamedTuple):
    """One list of waiting requests; `batch_id` is '' for a list that is not of one batch."""

    step: int
    tenant: str
    batch_id: str
    requests: int


class WaitingReads(Reads):
    """Reads queues' lengths. Each call raises StoreUnavailable if Redis cannot be used."""

    def waiting_totals(self, queues: Iterable[str]) -> dict[str, int]:
        """Return the number of requests that wait in each queue, in one round trip."""
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

    def waiting_lists(self, queue: str, most: int | None = MAX_LISTS) -> list[WaitingList]:
        """Return the lists of a queue that have requests, also kombu's."""
        kombu = [(step, "", naming.priority_list(queue, step)) for step in naming.PRIORITY_STEPS]
        kombu_keys = {key for _, _, key in kombu}
        lists = [*kombu, *(one for one in self.turns(queue, most) if one[2] not in kombu_keys)]
        lengths = self._each("llen", [key for _, _, key in lists])
        return [
            WaitingList(step, tenant, key.rpartition("\x06")[2] if tenant else "", length)
            for (step, tenant, key), length in zip(lists, lengths, strict=True)
            if length
        ]

    def waiting_by(self, queue: str, most: int | None = MAX_LISTS) -> list[Waiting]:
        """Return the waiting requests by priority and tenant, in the lists of `turns`."""
        lists = self.waiting_lists(queue, most)
        created = self._each("hget", [keys.batch_key(one.batch_id) for one in lists], "created_at")
        groups: dict[tuple[int, str], list[tuple[int, int | None]]] = {}
        for one, created_at in zip(lists, created, strict=True):
            at_ms = int(created_at) if created_at else None
            groups.setdefault((one.step, one.tenant), []).append((one.requests, at_ms))
        return [
            Waiting(
                queue,
                step,
                tenant,
                sum(length for length, _ in counted),
                min((at_ms for _, at_ms in counted if at_ms is not None), default=None),
                more=most is not None and len(counted) > most,
            )
            for (step, tenant), counted in groups.items()
        ]
