"""Which batch a thread takes next: tenants take turns, and none has all threads."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from contract.redis.due import Claim
from contract.redis.objects import Stored
from gateway.redis.leases import Lease

#: Batches of one tenant that wait here, leased; others stay where any gateway can take them.
MOST_WAITING = 16
#: Others are looked at again one after the other, at the pace of tiny batches, so that those of
#: another tenant are found between them; the first after so long, the last after so long, in ms.
APART_MS, SOONEST_MS, LATEST_MS = 8, 500, 10_000


@dataclass(slots=True)
class Waiting:
    """A batch that is leased, with its record as it was then."""

    tenant: str
    held: Lease[Claim]
    stored: Stored
    since: float = field(default_factory=time.monotonic)


class Turns:
    """The batches that wait for a thread. Any thread may call it.

    A tenant has at most half of the threads; the last free one is for tenants that have none.
    """

    def __init__(self, threads: int) -> None:
        self._share = max(1, threads // 2)
        self._free = threads
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Waiting]] = {}  # the next tenant first
        self._at_work = Counter[str]()
        self._later: dict[str, float] = {}
        self._closed = False

    def has_room(self, tenant: str) -> bool:
        """Return whether another batch of a tenant may wait here."""
        with self._lock:
            return not self._closed and len(self._waiting.get(tenant, ())) < MOST_WAITING

    def add(self, work: Waiting) -> None:
        """Have a batch wait for its turn."""
        with self._lock:
            self._waiting.setdefault(work.tenant, deque()).append(work)

    def again_ms(self, tenant: str) -> int:
        """Return when to look again at a batch that has no room: each of a tenant's a bit later."""
        with self._lock:
            now = time.monotonic() * 1000
            at = max(now + SOONEST_MS, self._later.get(tenant, 0))
            self._later[tenant] = at + APART_MS
            if len(self._later) > 1000:  # those whose time is over mean nothing
                self._later = {t: at for t, at in self._later.items() if at > now}
            return int(min(at - now, LATEST_MS))

    def take(self) -> Waiting | None:
        """Return the next batch, which then has a thread; None if there is none, or no thread."""
        with self._lock:
            if self._closed or not self._free:
                return None
            for tenant in self._waiting:
                running = self._at_work[tenant]
                if not running or (running < self._share and self._free > 1):
                    break
            else:
                return None
            queue = self._waiting.pop(tenant)
            work = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the others
            self._at_work[tenant] += 1
            self._free -= 1
            return work

    def done(self, work: Waiting) -> None:
        """Say that a batch's thread is free again."""
        with self._lock:
            self._free += 1
            self._at_work[work.tenant] -= 1
            self._at_work += Counter()  # forgets those at 0

    def crowded(self) -> bool:
        """Return whether batches wait for a thread."""
        with self._lock:
            return bool(self._waiting)

    def close(self) -> list[Waiting]:
        """Give out no more; return what still waits."""
        with self._lock:
            self._closed = True
            left = [work for queue in self._waiting.values() for work in queue]
            self._waiting.clear()
            return left
