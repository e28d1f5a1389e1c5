"""Lines over time as SVG paths: numbers only, so that a page needs neither style nor script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contract.redis.ring import Minute

#: Points of a line: a page stays small, and a screen shows no more.
POINTS = 144
WIDTH, HEIGHT = 720, 100


@dataclass(frozen=True, slots=True)
class Chart:
    """A line and the area under it; what its texts say: largest, mean and last value."""

    line: str
    area: str
    most: float
    mean: float
    last: float
    from_s: int
    to_s: int


def _chart(values: Sequence[float], minutes: Sequence[Minute], top: float | None = None) -> Chart:
    step = max(1, len(values) // POINTS)
    groups = [values[at : at + step] for at in range(0, len(values), step)]
    points = [sum(group) / len(group) for group in groups]
    most = max(points, default=0.0)
    scale = HEIGHT / ((top or most) or 1)
    width = WIDTH / max(1, len(points) - 1)
    places = [f"{n * width:.1f},{HEIGHT - value * scale:.1f}" for n, value in enumerate(points)]
    line = "M" + "L".join(places)
    mean = sum(values) / len(values) if values else 0.0
    return Chart(
        line, f"{line}L{WIDTH},{HEIGHT}L0,{HEIGHT}Z", most, mean, points[-1] if points else 0.0,
        minutes[0].minute * 60, minutes[-1].minute * 60,
    )  # fmt: skip


def rates(minutes: Sequence[Minute]) -> Chart:
    """Return the tokens written a second, since there were slots, but of an hour at least; without
    the minute that has just begun."""
    began = next((n for n, minute in enumerate(minutes) if minute.slots_s), 0)
    whole = minutes[max(0, min(began, len(minutes) - 61)) : -1] or minutes
    return _chart([minute.completion_tokens / 60 for minute in whole], whole)


def filled(minutes: Sequence[Minute]) -> Chart:
    """Return the share of slots in use, from 0 to 1; 0 where there was no slot."""
    return _chart([minute.fill or 0.0 for minute in minutes], minutes, top=1.0)
