"""Estimates the time left, from the workers' rate in the last minutes with work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.batch import Batch
from contract.redis.history import HistoryReads, Minute
from contract.redis.reads import Reads

#: Most minutes that count: the latest minutes with work in the last day.
MINUTES = 5


@dataclass(frozen=True, slots=True)
class Pace:
    """The rate of a queue's workers.

    `of_slot` is the tokens, read and written, of one slot in one second.
    """

    of_slot: float
    slots: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all slots."""
        return self.of_slot * self.slots

    def seconds(self, tokens: float, requests: int) -> float:
        """Return the seconds that these tokens take. A request uses one slot."""
        return tokens / (self.of_slot * max(1.0, min(self.slots, requests)))


def pace_of(minutes: Sequence[Minute], slots: int = 0) -> Pace | None:
    """Return the pace of `minutes` (oldest first); None if none of them had work.

    `slots` is the present number of slots; 0 means the number in those minutes.
    """
    worked = [m for m in minutes if m.busy_s and m.prompt_tokens + m.completion_tokens][-MINUTES:]
    if not worked:
        return None
    tokens = sum(minute.prompt_tokens + minute.completion_tokens for minute in worked)
    were = max(minute.slots_s for minute in worked) / 60
    return Pace(tokens / sum(minute.busy_s for minute in worked), slots or were)


def pace_of_queue(reads: Reads, queue: str, workers: Iterable[Mapping[str, Any]]) -> Pace | None:
    """Return the pace of a queue on these workers; None if it had no work in the last day."""
    slots = sum(n for one in workers if isinstance(n := one.get("slots"), int))
    return pace_of(HistoryReads.using(reads).day([queue]), slots) if slots else None


def seconds_left(pace: Pace | None, total: int, done: int, tokens: int) -> float | None:
    """Return the seconds to a batch's end, if nothing else runs; None if unknown.

    `tokens` is the sum of the `done` requests, from which that of all is extrapolated.
    """
    if pace is None or not done or not tokens:
        return None
    return pace.seconds((total - done) * tokens / done, total - done)


def batch_seconds_left(batch: Batch, pace: Pace | None) -> float | None:
    """Return the seconds to the end of a batch of `producer submit`; None if unknown."""
    tokens = batch.number("prompt_tokens") + batch.number("completion_tokens")
    return seconds_left(pace, batch.number("total"), batch.terminal, tokens)
