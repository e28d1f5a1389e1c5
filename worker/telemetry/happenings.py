"""How often the drain met what operators are told of, beside its counts of requests."""

from __future__ import annotations

from worker.drain.events import (
    EngineDied,
    EngineReady,
    Events,
    Leased,
    LeasesLost,
    RedisLost,
    Swept,
)


class Happenings:
    """Totals since the worker started; `ready_s` is how long the latest engine took to start."""

    def __init__(self, events: Events) -> None:
        self.redelivered = self.leases_lost = self.swept = 0
        self.engine_starts = self.engine_deaths = self.redis_outages = 0
        self.ready_s = 0.0
        events.subscribe(Leased, self._leased)
        events.subscribe(LeasesLost, self._leases_lost)
        events.subscribe(Swept, self._swept)
        events.subscribe(EngineReady, self._engine_ready)
        events.subscribe(EngineDied, self._engine_died)
        events.subscribe(RedisLost, self._redis_lost)

    def _leased(self, event: Leased) -> None:
        for delivery in event.deliveries:
            if delivery.returns:
                self.redelivered += 1

    def _leases_lost(self, event: LeasesLost) -> None:
        self.leases_lost += len(event.deliveries)

    def _swept(self, event: Swept) -> None:
        self.swept += event.count

    def _engine_ready(self, event: EngineReady) -> None:
        self.engine_starts += 1
        self.ready_s = event.seconds

    def _engine_died(self, _: EngineDied) -> None:
        self.engine_deaths += 1

    def _redis_lost(self, _: RedisLost) -> None:
        self.redis_outages += 1
