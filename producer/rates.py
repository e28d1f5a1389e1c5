"""Measures the rates of running batches, for `watch`, `top` and the page alike."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

#: Seconds over which the rate of a running batch is a mean.
WINDOW_S = 30.0
#: Requests of each slot that must have ended in the window, so that its rate gives a time left:
#: requests that begin together also end together.
ROUNDS = 3
#: Seconds, and times of a request, after which a time without an ended request is a pause of the
#: workers, which will not come again.
PAUSE_S, PAUSE_ROUNDS = 5.0, 2
#: Times of the usual time between two reads, after which (and after PAUSE_S) nothing was read:
#: Redis was away, or the batch had ended.
GAP = 3


class Recent(NamedTuple):
    """A batch's requests that have ended in its window, and their rate per second.

    `pause_s` is the longest time in the window in which none ended.
    """

    requests: int
    per_s: float
    pause_s: float = 0.0

    def seconds_left(self, left: int, slots: float) -> float | None:
        """Return the seconds of `left` requests at this rate; None if it is not known well enough.

        `slots` are those that serve the batch.
        """
        slots = max(1.0, slots)
        if not self.per_s or self.requests < ROUNDS * slots:
            return None
        if self.pause_s >= max(PAUSE_S, PAUSE_ROUNDS * slots / self.per_s):
            return None
        return left / self.per_s


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

    def add(self, *counters: int) -> list[Recent]:
        """Add the current counters; return what each has gained since the oldest read."""
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
        return [
            Recent(one, one / self.span if self.span > 0 else 0.0, self._pause_s(n))
            for n, one in enumerate(gained)
        ]

    def _is_gap(self, now: float) -> bool:
        """Return whether the last read was much longer ago than reads usually are."""
        if len(self._reads) < 2:
            return False
        (first, _), (last, _) = self._reads[0], self._reads[-1]
        return now - last > max(PAUSE_S, GAP * (last - first) / (len(self._reads) - 1))

    def _pause_s(self, n: int) -> float:
        """Return the longest time between two reads with the same counter `n`."""
        since, before = self._reads[0]
        longest = 0.0
        for then, counters in self._reads:
            if counters[n] != before[n]:
                since, before = then, counters
            longest = max(longest, then - since)
        return longest
