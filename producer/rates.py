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


class Recent(NamedTuple):
    """A batch's requests that have ended in its window, and their rate per second."""

    requests: int
    per_s: float

    def seconds_left(self, left: int, slots: float) -> float | None:
        """Return the seconds of `left` requests at this rate; None if it is not known well enough.

        `slots` are those that serve the batch.
        """
        if not self.per_s or self.requests < ROUNDS * max(1.0, slots):
            return None
        return left / self.per_s


class Window:
    """Counters that are read again and again; `span` are the seconds since the oldest read."""

    def __init__(self) -> None:
        self._reads: deque[tuple[float, tuple[int, ...]]] = deque()
        self.span = 0.0

    def add(self, *counters: int) -> list[Recent]:
        """Add the current counters; return what each has gained since the oldest read."""
        now, reads = time.monotonic(), self._reads
        reads.append((now, counters))
        while len(reads) > 2 and now - reads[1][0] >= WINDOW_S:
            reads.popleft()
        then, before = reads[0]
        self.span = now - then
        # A retry reduces the counters.
        gained = [max(0, new - old) for new, old in zip(counters, before, strict=True)]
        return [Recent(one, one / self.span if self.span > 0 else 0.0) for one in gained]
