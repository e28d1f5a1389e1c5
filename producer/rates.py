"""Measures the rates of running batches, for `watch`, `top` and the page alike."""

from __future__ import annotations

import time
from collections import deque

#: Seconds over which the rate of a running batch is a mean.
WINDOW_S = 30.0
#: Times of the usual time between two reads after which nothing was read, and least seconds: Redis
#: was away, or the batch had ended.
GAP, GAP_S = 3, 5.0


class Window:
    """Counters that are read again and again; `span` are the seconds since the oldest read.

    After a time without reads it begins anew, when a counter changes: what the batch did in that
    time is not known, and workers come back later than Redis.
    """

    def __init__(self) -> None:
        self._reads: deque[tuple[float, tuple[int, ...]]] = deque()
        #: Until when the window waits for a change, 0 if it does not wait.
        self._waits_until = 0.0
        self.span = 0.0

    def add(self, *counters: int) -> list[float]:
        """Add the current counters; return what each has gained a second since the oldest read."""
        now, reads = time.monotonic(), self._reads
        if self._is_gap(now):
            self._waits_until = now + WINDOW_S
            reads.clear()
        elif self._waits_until:
            if counters != reads[0][1] or now >= self._waits_until:
                self._waits_until = 0.0
            reads.clear()
        reads.append((now, counters))
        while len(reads) > 2 and now - reads[1][0] >= WINDOW_S:
            reads.popleft()
        then, before = reads[0]
        self.span = now - then
        # A retry reduces the counters.
        gained = [max(0, new - old) for new, old in zip(counters, before, strict=True)]
        return [one / self.span if self.span > 0 else 0.0 for one in gained]

    def _is_gap(self, now: float) -> bool:
        """Return whether the last read was much longer ago than reads usually are."""
        if len(self._reads) < 2:
            return False
        (first, _), (last, _) = self._reads[0], self._reads[-1]
        return now - last > max(GAP_S, GAP * (last - first) / (len(self._reads) - 1))
