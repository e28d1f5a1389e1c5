"""Counts requests that wait for the end of a dead worker's leases."""

from __future__ import annotations

from dataclasses import dataclass, field

from contract.batch import Batch
from contract.errors import StoreForbidden
from contract.naming import PRIORITY_SEPARATOR
from contract.redis import keys
from contract.redis.announcements import WORKER_SILENT_S
from contract.redis.reads import Reads

#: Most leases that are read. Workers renew theirs, so a dead worker's are among the first to end.
MOST_LEASES = 1000


#: Step, tenant and batch id of a list in which requests wait (contract/redis/waiting.py).
Place = tuple[int, str, str]


@dataclass(slots=True)
class LostLeases:
    """The leases of dead workers in one queue.

    After `left_s` seconds a sweep has returned the last one, if workers sweep (`swept`). `places`
    has these seconds for each list to which requests return.
    """

    requests: int = 0
    left_s: float = 0.0
    workers: set[str] = field(default_factory=set)
    places: dict[Place, float] = field(default_factory=dict)
    swept: bool = True

    def add(self, worker: str, place: Place | None, left_s: float) -> None:
        """Add one lease."""
        self.requests += 1
        self.workers.add(worker)
        self.left_s = max(self.left_s, left_s)
        if place is not None:
            self.places[place] = max(self.places.get(place, 0.0), left_s)


class LostLeaseReads(Reads):
    """Reads the leases in one Redis. Calls raise StoreUnavailable."""

    def lost_leases(self, batch: Batch | None = None) -> dict[str, LostLeases]:
        """Return the leases of dead workers by queue; with `batch` only those of its requests.

        A worker is dead if its announcement, which it writes every second, is missing or old. An
        old one shows nothing while Redis has just come back.
        """
        pipe = self._client.pipeline(transaction=False)
        pipe.hgetall(keys.WORKERS).time().hget(keys.SWEEP, "hold")
        pipe.zrange(keys.LEASES, "1", "+inf", byscore=True, offset=0, num=MOST_LEASES,
                    withscores=True)  # fmt: skip
        try:
            announced, (seconds, microseconds), hold_ms, leases = pipe.execute()
        except StoreForbidden:
            return {}
        now_s = seconds + microseconds / 1e6
        silent = {name for name, one in announced.items() if _is_silent(one, now_s)}
        if silent and self.up_s() < WORKER_SILENT_S:
            silent = set()
        ends: dict[bytes, dict[bytes, float]] = {}
        for lease, ends_ms in leases:
            worker = lease.rpartition(b"/")[0]
            if worker in silent or worker not in announced:
                ends.setdefault(worker, {})[lease] = ends_ms
        by_queue: dict[str, LostLeases] = {}
        # A run's leases are those of its windows.
        owners = None if batch is None else {(part.id, part.life) for part in batch.parts}
        # Each living worker sweeps; until `hold` a sweep returns no lease.
        swept = len(silent) < len(announced)
        held_s = int(hold_ms or 0) / 1000 - now_s
        names = [worker.decode(errors="replace") for worker in ends]
        records = self._each("hgetall", [keys.worker_key(name) for name in names])
        for name, ends_of_worker, leased in zip(names, ends.values(), records, strict=True):
            for lease in ends_of_worker.keys() & leased.keys():
                # Fields: slots, cost, size, list, home, id, batch, life (contract/lua/leases.lua).
                record = leased[lease].decode(errors="replace")
                _, _, _, list_key, home, _, *owner = record.split("\0", 7)
                if owners is None or tuple(owner) in owners:
                    queue = list_key.partition(PRIORITY_SEPARATOR[0])[0].removesuffix(":suspects")
                    lost = by_queue.setdefault(queue, LostLeases(swept=swept))
                    lost.add(name, _place(home), max(ends_of_worker[lease] / 1000 - now_s, held_s))
        return by_queue


def _place(key: str) -> Place | None:
    """Return the place of a list; None for one of kombu's, which has no batch."""
    step, *rest = key.rpartition(PRIORITY_SEPARATOR)[2].split("\x06")
    return (int(step), rest[0], rest[1]) if len(rest) == 2 and step.isdecimal() else None


def _is_silent(announcement: bytes, now_s: float) -> bool:
    """Return whether an announcement is so old that its worker counts as dead."""
    at_ms = announcement.partition(b"\0")[0]
    return not at_ms.isdigit() or abs(now_s - int(at_ms) / 1000) >= WORKER_SILENT_S
