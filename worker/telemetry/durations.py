"""How long requests take, counted by buckets as they end."""

from __future__ import annotations

from contract.histogram import Histogram
from worker.drain.events import Committed, Events


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
