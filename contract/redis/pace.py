"""Measures a queue's pace: tokens per second of its workers in their last minutes of work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.redis.history import Minute

#: Most minutes that an estimate uses: the latest ones with work in the last day. It uses no more
#: than have ROUNDS requests and ENOUGH_S seconds of each slot: older work may be of another kind.
#: With fewer requests a rate is too low, because requests that begin together also end together.
MINUTES, ROUNDS, ENOUGH_S = 5, 3, 30
#: Requests in those minutes below which the estimate is rough: a new worker's first requests wait
#: for compilation.
_FEW_REQUESTS = 30


@dataclass(frozen=True, slots=True)
class Pace:
    """The rate of a queue's workers.

    `of_slot` is the number of tokens that one slot reads and writes in one second, `of_request` the
    mean number of tokens of a request. `requests` is the number of requests on which the rate was
    measured; None if unknown.
    """

    of_slot: float
    slots: float
    of_request: float = 0.0
    requests: int | None = None

    @property
    def rough(self) -> bool:
        """Whether the rate was measured on few requests."""
        return self.requests is not None and self.requests < _FEW_REQUESTS

    @property
    def too_rough(self) -> bool:
        """Whether not even each slot had a request, so that the rate gives no time left.

        That is so after a trial of a few lines.
        """
        return self.rough and (self.requests or 0) < self.slots

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all slots."""
        return self.of_slot * self.slots

    def seconds(self, tokens: float, requests: int) -> float:
        """Return the seconds of `requests` with `tokens` in all. A request uses one slot."""
        return tokens / (self.of_slot * max(1.0, min(self.slots, requests)))

    def ends(self, tokens: float, requests: int, before: int) -> float:
        """Return the seconds of `requests` with `tokens` in all, and of `before` other requests."""
        return self.seconds(tokens + before * self.of_request, requests + before)


def pace_of(minutes: Sequence[Minute], slots: int = 0) -> Pace | None:
    """Return the pace of `minutes` (oldest first); None if none of them had work.

    `slots` is the current number of slots; 0 means the number in those minutes.
    """
    worked = [m for m in minutes if m.busy_s and m.prompt_tokens + m.completion_tokens][-MINUTES:]
    if not worked:
        return None
    slots_then = max(minute.slots_s for minute in worked) / 60
    worked = _enough(worked, slots or slots_then)
    tokens = sum(minute.prompt_tokens + minute.completion_tokens for minute in worked)
    requests = sum(minute.completed + minute.other for minute in worked)
    busy_s = sum(minute.busy_s for minute in worked)
    of_request = tokens / requests if requests else 0.0
    return Pace(tokens / busy_s, slots or slots_then, of_request, requests)


def _enough(minutes: list[Minute], slots: float) -> list[Minute]:
    """Return the latest minutes that are enough for a rate; all if they are too few."""
    requests = slots_s = 0
    for count, minute in enumerate(reversed(minutes), 1):
        requests += minute.completed + minute.other
        slots_s += minute.slots_s
        if requests >= ROUNDS * slots and slots_s >= ENOUGH_S * slots:
            return minutes[-count:]
    return minutes


def slots_of(workers: Iterable[Mapping[str, Any]]) -> int:
    """Return the slots of the workers that can run requests."""
    able = (one for one in workers if one.get("state") not in ("draining", "degraded"))
    return sum(n for one in able if isinstance(n := one.get("slots"), int))
