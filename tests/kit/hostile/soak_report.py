"""What the nine honest tenants of a soak saw in each part, and what the tenth did meanwhile."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: p99 of the honest ones may be so many times that without the hostile one.
TIMES = 3.0
#: A chat that takes longer is looked at: which of the tenth's requests were in flight meanwhile?
SLOW_S = 1.0
#: So many of the slow chats, and of the names beside them, are listed.
LISTED = 20


class Span(NamedTuple):
    """From when to when a request was in flight, by the monotonic clock."""

    name: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


@dataclass
class Part:
    """What the honest tenants saw in one part, and how it went."""

    lasted_s: float = 0.0
    chats: list[Span] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    batch_lines: int = 0
    lost: int = 0
    doubled: int = 0
    #: The tenth's requests; a batch's lines are in flight as long as their batch.
    tenth: list[Span] = field(default_factory=list)
    #: How requests of the tenth ended that should have ended otherwise, by their names.
    wrong_ends: dict[str, list[str]] = field(default_factory=dict)
    #: Seconds of a core, by process.
    cpu_s: dict[str, float] = field(default_factory=dict)
    workers_ended: int = 0
    silent_s: float = 0.0
    grown_mib: int = 0

    @property
    def cores(self) -> float:
        """How many cores all processes had, on average."""
        return sum(self.cpu_s.values()) / self.lasted_s if self.lasted_s else 0.0

    def at(self, percent: int) -> float:
        """Return the time that so many of a hundred chats did not exceed."""
        ordered = sorted(chat.seconds for chat in self.chats) or [0.0]
        return round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 3)

    def figures(self) -> dict[str, Any]:
        """Return counts, the spread of the answers' times, and what was in flight at slow ones."""
        slow = sorted((c for c in self.chats if c.seconds > SLOW_S), key=lambda c: -c.seconds)
        return {f"p{percent}_s": self.at(percent) for percent in (50, 90, 99)} | {
            "max_s": self.at(100), "chats": len(self.chats), "refused": dict(self.refused),
            "batch_lines": self.batch_lines, "lost": self.lost, "doubled": self.doubled,
            "tenth": len(self.tenth), "wrong_ends": self.wrong_ends,
            "lasted_s": round(self.lasted_s, 1), "cores": round(self.cores, 2),
            "cpu_s": {name: round(seconds, 1) for name, seconds in self.cpu_s.items()},
            "workers_ended": self.workers_ended, "silent_s": round(self.silent_s, 2),
            "grown_mib": self.grown_mib, "slow": len(slow), "worst_names": self._names(slow),
            "slowest": [
                {"s": round(chat.seconds, 2), "at_s": round(chat.began - self._start, 1),
                 "beside": sorted({t.name for t in self._beside(chat)})}
                for chat in slow[:LISTED]
            ],
        }  # fmt: skip

    def line(self) -> str:
        """Return the figures in a line for people, and the worst names in another."""
        found = self.figures()
        worst = list(found.pop("worst_names").items())[:8]
        del found["slowest"]
        found["wrong_ends"] = {name: len(ends) for name, ends in self.wrong_ends.items()}
        names = "; ".join(f"{name} {seen}" for name, seen in worst)
        return json.dumps(found) + (f"\n    beside slow chats: {names}" if names else "")

    @property
    def _start(self) -> float:
        return min(chat.began for chat in self.chats)

    def _beside(self, chat: Span) -> Iterable[Span]:
        return (t for t in self.tenth if t.began < chat.ended and t.ended > chat.began)

    def _names(self, slow: list[Span]) -> dict[str, dict[str, float]]:
        """Return the tenth's requests that were in flight at the most slow chats, by name.

        What is often in flight is often beside a slow chat: `per_s` is by its own seconds.
        """
        flown, beside, worst = Counter[str](), Counter[str](), defaultdict[str, float](float)
        for sent in self.tenth:
            flown[sent.name] += sent.seconds  # type: ignore[assignment]
        for chat in slow:
            for name in {t.name for t in self._beside(chat)}:
                beside[name] += 1
                worst[name] = max(worst[name], chat.seconds)
        return {
            name: {"slow": count, "flown_s": round(flown[name], 1),
                   "per_s": round(count / max(flown[name], 0.1), 2),
                   "worst_s": round(worst[name], 2)}
            for name, count in beside.most_common(LISTED)
        }  # fmt: skip


@dataclass
class SoakReport:
    """What a soak did and found: its parts by name."""

    seed: int
    parts: dict[str, Part] = field(default_factory=dict)

    def text(self) -> str:
        """Return it as JSON for people."""
        told = {name: part.figures() for name, part in self.parts.items()}
        return json.dumps({"seed": self.seed, "broken": self.broken()} | told, indent=2)

    def broken(self) -> dict[str, object]:
        """Return the bars that broke; beside an honest heavy tenant time is only measured."""
        found: dict[str, object] = {}
        for name, part in self.parts.items():
            given = {"lost": part.lost, "doubled": part.doubled, "refused": dict(part.refused),
                     "own ends": part.wrong_ends}  # fmt: skip
            found |= {f"{what}, {name}": value for what, value in given.items() if value}
        if beside := self.parts.get("hostile"):
            alone_s, beside_s = self.parts["alone"].at(99), beside.at(99)
            if beside_s > TIMES * alone_s:
                found["p99"] = f"{beside_s} s, alone {alone_s} s"
            if not beside.tenth:
                found["hostile"] = "nothing was sent"
        return found
