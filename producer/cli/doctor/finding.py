"""Defines the results of the checks of `producer doctor`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from producer.cli.marks import Level, level_of
from producer.stalls import Stall

Area = Literal["redis", "workers", "queue", "disk", "settings"]
#: Most names of a list that are printed.
_MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check: text and remedy for people, code and facts for scripts.

    A code never changes. Facts named `..._bytes` and `..._s` are bytes and seconds.
    """

    area: Area
    code: str
    level: Level
    text: str
    remedy: str | None
    facts: dict[str, Any]


def ok(area: Area, code: str, text: str, **facts: Any) -> Finding:
    """Return a finding that needs no action."""
    return Finding(area, code, "ok", text, None, facts)


def remark(area: Area, code: str, text: str, remedy: str, **facts: Any) -> Finding:
    """Return a finding that may need a change but does not stop the work."""
    return Finding(area, code, "remark", text, remedy, facts)


def problem(area: Area, code: str, text: str, remedy: str, **facts: Any) -> Finding:
    """Return a finding that stops the work, now or later."""
    return Finding(area, code, "problem", text, remedy, facts)


def of_stall(area: Area, stall: Stall) -> Finding:
    """Return the finding about a stall."""
    facts, level = stall.facts, level_of(stall)
    return Finding(area, stall.code, level, stall.sentence(), stall.advice(), facts)


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list, separated by commas, and the number of further names."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
