"""Decides which batch a thread takes next: tenants take turns, and none has all threads."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from contract.redis.due import Claim
from contract.redis.objects import Stored
from gateway.redis.leases import Lease

#: Claimed batches of one tenant that wait in this process; more stay in Redis for any gateway.
MOST_WAITING = 16
#: Further batches are due again APART_MS apart, so that batches of other tenants
#: are claimed between them; the first after SOONEST_MS, the last after LATEST_MS.
APART_MS, SOONEST_MS, LATEST_MS = 8, 500, 10_000


@dataclass(slots=True)
class Waiting:
    """A claimed batch, with its record as it was read then."""

    tenant: str
    lease: Lease[Claim]
    stored: Stored
    since: float = field(default_factory=time.monotonic)


class Turns:
    """The batches that wait for a thread. Thread-safe.

    A tenant has at most half of the threads; the last free one is for tenants that have none.
    """

    def __init__(self, threads: int) -> None:
        self._most_each = max(1, threads // 2)
        self._free = threads
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Waiting]] = {}  # the next tenant first
        self._running = Counter[str]()
        self._due_at_ms: dict[str, float] = {}
        self._closed = False

    def accepts(self, tenant: str) -> bool:
        """Return whether another batch of a tenant may wait here."""
        with self._lock:
            return not self._closed and len(self._waiting.get(tenant, ())) < MOST_WAITING

    def add(self, work: Waiting) -> None:
        with self._lock:
            self._waiting.setdefault(work.tenant, deque()).append(work)

    def again_ms(self, tenant: str) -> int:
        """Return after how long a batch that is not accepted is due again."""
        with self._lock:
            now = time.monotonic() * 1000
            at = max(now + SOONEST_MS, self._due_at_ms.get(tenant, 0))
            self._due_at_ms[tenant] = at + APART_MS
            if len(self._due_at_ms) > 1000:
                self._due_at_ms = {t: at for t, at in self._due_at_ms.items() if at > now}
            return int(min(at - now, LATEST_MS))

    def take(self) -> Waiting | None:
        """Assign a thread to the next batch; None if there is no batch or no free thread."""
        with self._lock:
            if self._closed or not self._free:
                return None
            for tenant in self._waiting:
                running = self._running[tenant]
                if not running or (running < self._most_each and self._free > 1):
                    break
            else:
                return None
            queue = self._waiting.pop(tenant)
            work = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # its next turn is the last
            self._running[tenant] += 1
            self._free -= 1
            return work

    def done(self, work: Waiting) -> None:
        with self._lock:
            self._free += 1
            self._running[work.tenant] -= 1
            self._running += Counter()  # drops the zeros

    def crowded(self) -> bool:
        with self._lock:
            return bool(self._waiting)

    def close(self) -> list[Waiting]:
        """Assign no more threads; return what still waits."""
        with self._lock:
            self._closed = True
            left = [work for queue in self._waiting.values() for work in queue]
            self._waiting.clear()
            return left
