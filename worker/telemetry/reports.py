"""What one drain tells of itself and has seen, and that of several drains together.

A worker with several front ends tells of all of them as of one: the others send their reports
(worker/process/front_end.py), as the JSON that is made here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from contract.histogram import Histogram
from contract.naming import TASK_NAME
from contract.redis.scripts import script_errors, script_times
from worker.drain.drain import Drain
from worker.drain.events import (
    Committed,
    EngineDied,
    EngineReady,
    Events,
    Leased,
    LeasesLost,
    RedisLost,
    Swept,
)
from worker.drain.in_flight import Running
from worker.drain.scripts import SCRIPTS

Told = dict[str, Any]

#: What happens once, however many drains feed one engine from one Redis.
GREATEST = ("engine_starts", "engine_deaths", "ready_s", "redis_outages")


class Seen:
    """Counts what happens in a drain, by its events.

    `durations` has what requests took that reached the engine, in seconds: in its hands, before,
    and in all. Those of a batch count from its creation; of others only the time in the engine is
    known. `happenings` has totals; `ready_s` is how long the latest engine took to start.
    """

    def __init__(self, events: Events) -> None:
        self.durations = {name: Histogram() for name in ("engine", "queued", "whole")}
        self.happenings: dict[str, float] = dict.fromkeys(
            ("redelivered", "leases_lost", "swept", *GREATEST), 0
        )
        events.subscribe(Committed, self._committed)
        events.subscribe(Leased, self._leased)
        events.subscribe(LeasesLost, lambda lost: self._count("leases_lost", len(lost.deliveries)))
        events.subscribe(Swept, lambda swept: self._count("swept", swept.count))
        events.subscribe(EngineReady, self._engine_ready)
        events.subscribe(EngineDied, lambda _: self._count("engine_deaths"))
        events.subscribe(RedisLost, lambda _: self._count("redis_outages"))

    def _count(self, name: str, more: int = 1) -> None:
        self.happenings[name] += more

    def _committed(self, event: Committed) -> None:
        took = self.durations
        for ending in event.endings:
            times = ending.times
            if not times:
                continue
            engine_s = times["engine_s"]
            took["engine"].add(engine_s)
            if "queued_s" in times:
                queued_s = times["queued_s"]
                took["queued"].add(queued_s)
                took["whole"].add(queued_s + engine_s)

    def _leased(self, event: Leased) -> None:
        for delivery in event.deliveries:
            if delivery.returns:
                self.happenings["redelivered"] += 1

    def _engine_ready(self, event: EngineReady) -> None:
        self.happenings["engine_starts"] += 1
        self.happenings["ready_s"] = event.seconds

    def as_json(self) -> Told:
        """Return histograms (`counts` by bucket, `total`) by name, and totals by name."""
        return {
            "durations": {
                name: {"counts": list(of.counts), "total": of.total}
                for name, of in self.durations.items()
            },
            "happenings": dict(self.happenings),
        }


def report_of(drain: Drain, seen: Seen | None = None) -> Told:
    """Return what a drain tells of itself; JSON can carry it."""
    report = {
        "in_flight": len(drain.in_flight),
        "oldest_s": drain.in_flight.oldest_s(),
        "limit": drain.limits.limit,
        "slots": drain.limits.slots,
        "redis_errors": script_errors(),
        "scripts": {name: list(of) for name, of in script_times(SCRIPTS).items()},
        "cached_tokens": drain.supervisor.cached_prompt_tokens(),
        "counts": drain.counts.as_json(),
    }
    return report if seen is None else report | {"seen": seen.as_json()}


def as_task(running: Running, process: int) -> dict[str, Any]:
    """Return it as Celery lists tasks; the command adds the worker's name."""
    delivery = running.delivery
    return {
        "id": delivery.request_id,
        "name": TASK_NAME,
        "worker_pid": process,
        "batch": delivery.batch or None,
        "custom_id": delivery.custom_id,
        "attempt": delivery.attempt,
    }


def summed(reports: Iterable[Told], name: str) -> int:
    """Return the sum of what each report has under a name."""
    return sum(int(each[name]) for each in reports)


def counts_of(reports: Sequence[Told]) -> dict[str, int]:
    """Return the counts of all reports, of which there is one at least."""
    names = reports[0]["counts"]
    return {name: summed((each["counts"] for each in reports), name) for name in names}


def together(told: Iterable[Told]) -> Told:
    """Return the sum of what several drains have seen; of what is not counted, the greatest."""
    first, *others = told
    for other in others:
        first = {
            "durations": {
                name: _added(of, other["durations"][name])
                for name, of in first["durations"].items()
            },
            "happenings": {
                name: max(value, more) if name in GREATEST else value + more
                for name, value in first["happenings"].items()
                if (more := other["happenings"][name]) is not None
            },
        }
    return first


def _added(one: Told, other: Told) -> Told:
    counts = [a + b for a, b in zip(one["counts"], other["counts"], strict=True)]
    return {"counts": counts, "total": one["total"] + other["total"]}
