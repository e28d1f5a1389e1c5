"""How long requests take, counted by buckets as they end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from worker.drain.events import Committed, Events

#: Upper bounds in seconds, from an online answer to a batch that waited for a day.
BOUNDS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 10800,
    43200, 86400,
)  # fmt: skip


class Histogram:
    """Counts of values by bucket. Written on one thread, read on any.

    Not prometheus_client's own: that takes a lock and compares with each bound in Python, 0.9 us a
    value, where this takes 0.2.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value, in the unit of the bounds."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def buckets(counts: Sequence[int], bounds: Sequence[float] = BOUNDS) -> list[tuple[str, float]]:
    """Return (upper bound as text, how many are at most that), the last one `+Inf`."""
    names = [*map(str, map(float, bounds)), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


class Durations:
    """What requests took that reached the engine: in its hands, before, and in all, in seconds.

    Those of a batch count from its creation; of others only the time in the engine is known.
    """

    def __init__(self, events: Events) -> None:
        self.engine, self.queued, self.whole = Histogram(), Histogram(), Histogram()
        events.subscribe(Committed, self._committed)

    def _committed(self, event: Committed) -> None:
        for ending in event.endings:
            times = ending.times
            if not times:
                continue
            engine_s = times["engine_s"]
            self.engine.add(engine_s)
            if "queued_s" in times:
                queued_s = times["queued_s"]
                self.queued.add(queued_s)
                self.whole.add(queued_s + engine_s)
