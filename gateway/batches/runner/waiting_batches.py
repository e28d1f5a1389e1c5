"""Decides which batch a thread takes next, so that no tenant gets all threads."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from contract.redis.due import Claim
from contract.redis.objects import Stored
from gateway.redis.leases import Lease

#: Most claimed batches of one tenant that wait in this process; further ones stay in Redis.
MOST_WAITING = 16
#: Milliseconds after which a tenant's further batches are due again: SOONEST_MS for the first,
#: APART_MS more for each later one (so that other tenants' batches are claimed between them),
#: LATEST_MS at most.
APART_MS, SOONEST_MS, LATEST_MS = 8, 500, 10_000


@dataclass(slots=True)
class WaitingBatch:
    """A claimed batch that waits for a thread, with its record as claimed."""

    tenant: str
    lease: Lease[Claim]
    stored: Stored
    since: float = field(default_factory=time.monotonic)


class WaitingBatches:
    """Holds the batches that wait for a thread. Thread-safe.

    A tenant gets at most half of the threads; the last free thread is kept for tenants without one.
    """

    def __init__(self, threads: int) -> None:
        self._most_each = max(1, threads // 2)
        self._free = threads
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[WaitingBatch]] = {}  # by tenant, the next tenant first
        self._running = Counter[str]()
        self._due_at_ms: dict[str, float] = {}
        self._closed = False

    def accepts(self, tenant: str) -> bool:
        """Return whether another batch of a tenant may wait here."""
        with self._lock:
            return not self._closed and len(self._waiting.get(tenant, ())) < MOST_WAITING

    def add(self, work: WaitingBatch) -> None:
        with self._lock:
            self._waiting.setdefault(work.tenant, deque()).append(work)

    def again_ms(self, tenant: str) -> int:
        """Return the ms after which a batch that is not accepted is due again."""
        with self._lock:
            now = time.monotonic() * 1000
            at = max(now + SOONEST_MS, self._due_at_ms.get(tenant, 0))
            self._due_at_ms[tenant] = at + APART_MS
            if len(self._due_at_ms) > 1000:
                self._due_at_ms = {t: at for t, at in self._due_at_ms.items() if at > now}
            return int(min(at - now, LATEST_MS))

    def take(self) -> WaitingBatch | None:
        """Assign a thread to the next batch; None without a batch or a free thread."""
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
                self._waiting[tenant] = queue  # moves the tenant to the end
            self._running[tenant] += 1
            self._free -= 1
            return work

    def done(self, work: WaitingBatch) -> None:
        with self._lock:
            self._free += 1
            self._running[work.tenant] -= 1
            self._running += Counter()  # removes tenants without a thread

    def crowded(self) -> bool:
        """Return whether any batch waits for a thread."""
        with self._lock:
            return bool(self._waiting)

    def close(self) -> list[WaitingBatch]:
        """Assign no more threads; return the batches that still wait."""
        with self._lock:
            self._closed = True
            left = [work for queue in self._waiting.values() for work in queue]
            self._waiting.clear()
            return left
