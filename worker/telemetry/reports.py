"""Makes reports of a drain's requests in flight and counts, and sums up all front ends' reports.

Further front ends send their reports to the worker as JSON (worker/process/front_end.py).
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

#: The numbers of one front end, as JSON values; report_of() returns the fields.
Report = dict[str, Any]

#: The totals of events that every front end counts although they happen once in a worker: the
#: worker's total is the maximum of its front ends' totals.
HAPPENS_ONCE = ("engine_starts", "engine_deaths", "ready_s", "redis_outages")


class EventTotals:
    """Counts a drain's events.

    `durations` has histograms of seconds: `engine` in the engine, `queued` from a batch's creation
    until a request was taken, and `whole` from the batch's creation to the request's answer. The
    latter two are of requests in batches only. `happenings` has totals, and `ready_s`, the seconds
    of the latest engine start.
    """

    def __init__(self, events: Events) -> None:
        self.durations = {name: Histogram() for name in ("engine", "queued", "whole")}
        self.happenings: dict[str, float] = dict.fromkeys(
            ("redelivered", "leases_lost", "swept", *HAPPENS_ONCE), 0
        )
        events.subscribe(Committed, self._committed)
        events.subscribe(Leased, self._leased)
        events.subscribe(LeasesLost, lambda lost: self._count("leases_lost", len(lost.deliveries)))
        events.subscribe(Swept, lambda swept: self._count("swept", swept.requests))
        events.subscribe(EngineReady, self._engine_ready)
        events.subscribe(EngineDied, lambda _: self._count("engine_deaths"))
        events.subscribe(RedisLost, lambda _: self._count("redis_outages"))

    def _count(self, name: str, more: int = 1) -> None:
        self.happenings[name] += more

    def _committed(self, event: Committed) -> None:
        took = self.durations
        for ending in event.endings:
            if not (times := ending.times):
                continue
            took["engine"].add(times["engine_s"])
            if "queued_s" in times:
                took["queued"].add(times["queued_s"])
                took["whole"].add(times["queued_s"] + times["engine_s"])

    def _leased(self, event: Leased) -> None:
        for delivery in event.deliveries:
            if delivery.returns:
                self.happenings["redelivered"] += 1

    def _engine_ready(self, event: EngineReady) -> None:
        self.happenings["engine_starts"] += 1
        self.happenings["ready_s"] = event.seconds

    def as_json(self) -> Report:
        """Return `durations` (a histogram's `counts` by bucket, and `total`) and `happenings`."""
        return {
            "durations": {
                name: {"counts": list(of.counts), "total": of.total}
                for name, of in self.durations.items()
            },
            "happenings": dict(self.happenings),
        }


def report_of(drain: Drain, totals: EventTotals | None = None) -> Report:
    """Return the report of a drain, with the event totals if they are given."""
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
    return report if totals is None else report | {"seen": totals.as_json()}


def report_of_part(drain: Drain) -> Report:
    """Return the report of a further drain of a process, whose first drain reports the scripts."""
    return report_of(drain) | {"redis_errors": 0, "scripts": {}}


def as_task(running: Running, process: int) -> dict[str, Any]:
    """Return a request in flight as `celery inspect active` lists it, without `hostname`."""
    delivery = running.delivery
    return {
        "id": delivery.request_id,
        "name": TASK_NAME,
        "worker_pid": process,
        "batch": delivery.batch or None,
        "custom_id": delivery.custom_id,
        "attempt": delivery.attempt,
    }


def summed(reports: Iterable[Report], name: str) -> int:
    """Return the sum of one field over the reports."""
    return sum(int(each[name]) for each in reports)


def counts_of(reports: Sequence[Report]) -> dict[str, int]:
    """Return the sum of the reports' `counts`; at least one report must be given."""
    counts = [each["counts"] for each in reports]
    return {name: summed(counts, name) for name in counts[0]}


def totals_of(reports: Sequence[Report]) -> Report:
    """Return the sum of the reports' event totals, with the fields of EventTotals.as_json()."""
    totals = [each["seen"] for each in reports if "seen" in each]
    durations = {}
    for name in totals[0]["durations"]:
        histograms = [each["durations"][name] for each in totals]
        buckets = zip(*(each["counts"] for each in histograms), strict=True)
        total = sum(each["total"] for each in histograms)
        durations[name] = {"counts": [sum(bucket) for bucket in buckets], "total": total}
    happenings = {
        name: (max if name in HAPPENS_ONCE else sum)(each["happenings"][name] for each in totals)
        for name in totals[0]["happenings"]
    }
    return {"durations": durations, "happenings": happenings}
