"""Whether a tenant that has requests waiting goes without an answer."""

from __future__ import annotations

import time
from collections import Counter

from contract.redis.batches import BatchStore


class Starvation:
    """Looks again and again who waits, and whose requests end."""

    def __init__(self, store: BatchStore, queue: str, patience_s: float) -> None:
        self._store = store
        self._queue = queue
        self._patience_s = patience_s
        #: Of each tenant how many of its requests had ended, and since when.
        self._ended: dict[str, tuple[int, float]] = {}

    def look(self) -> None:
        """Raise TimeoutError if none of a waiting tenant's requests ended for so long."""
        now, ended = time.monotonic(), Counter[str]()
        for batch in self._store.batches():
            ended[batch.tenant] += batch.terminal
        for tenant, load in self._store.tenant_loads(self._queue).items():
            seen, since = self._ended.get(tenant, (-1, now))
            if not load.waiting or ended[tenant] != seen:
                self._ended[tenant] = (ended[tenant], now)
            elif now - since > self._patience_s:
                raise TimeoutError(f"tenant {tenant} has {load.waiting} waiting, and none ends")
