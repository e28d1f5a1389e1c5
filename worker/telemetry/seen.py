"""What one drain has seen since its worker started, and that of several drains together.

A worker with several front ends tells of all of them: the others send what they have seen with
their reports (worker/process/front_end.py), as the JSON that is made here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from worker.drain.events import Events
from worker.telemetry.durations import Durations
from worker.telemetry.happenings import Happenings

Told = dict[str, Any]


class Seen:
    """Counts what happens in a drain, by its events."""

    def __init__(self, events: Events) -> None:
        self._durations = Durations(events)
        self._happenings = Happenings(events)

    def as_json(self) -> Told:
        """Return histograms (`counts` by bucket, `total`) by name, and totals by name."""
        return {
            "durations": {
                name: {"counts": list(of.counts), "total": of.total}
                for name, of in vars(self._durations).items()
            },
            "happenings": dict(vars(self._happenings)),
        }


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


#: What happens once, however many drains feed one engine from one Redis.
GREATEST = ("engine_starts", "engine_deaths", "ready_s", "redis_outages")


def _added(one: Told, other: Told) -> Told:
    counts = [a + b for a, b in zip(one["counts"], other["counts"], strict=True)]
    return {"counts": counts, "total": one["total"] + other["total"]}
