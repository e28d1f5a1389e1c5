"""Counts one drain's requests and tokens, and averages the recent ones."""

from __future__ import annotations

from typing import Any

from worker.drain.events import Committed, Events, HandedBack, Leased

#: Number of recent answers over which mean lengths are taken.
ANSWERS = 1000
#: Half-life of the share of time with full slots, in seconds of work.
HALF_LIFE_S = 600.0


class Counts:
    """The totals since the worker started; only completed requests have tokens."""

    def __init__(self, events: Events) -> None:
        self.popped = self.handed_back = 0
        self.completed = self.failed = self.cancelled = self.expired = 0
        self.prompt_tokens = self.completion_tokens = 0
        # Of prompts that are only text.
        self.characters = self.text_tokens = 0
        events.subscribe(Leased, self._leased)
        events.subscribe(HandedBack, self._handed_back)
        events.subscribe(Committed, self._committed)

    @property
    def ended(self) -> int:
        """Requests that have a result, of any outcome."""
        return self.completed + self.failed + self.cancelled + self.expired

    def add(self, more: Counts) -> None:
        """Add other totals to these."""
        for name, number in vars(more).items():
            setattr(self, name, getattr(self, name) + number)

    def as_json(self) -> dict[str, Any]:
        """Return the totals as `celery inspect stats` shows them."""
        return dict(vars(self))

    def _leased(self, event: Leased) -> None:
        self.popped += len(event.deliveries)

    def _handed_back(self, event: HandedBack) -> None:
        self.handed_back += len(event.deliveries)

    def _committed(self, event: Committed) -> None:
        for ending in event.endings:
            if ending.outcome:  # an ending with outcome '' only drops a lease
                setattr(self, ending.outcome, getattr(self, ending.outcome) + 1)
            self.prompt_tokens += ending.prompt_tokens
            self.completion_tokens += ending.completion_tokens
            self.characters += ending.characters
            self.text_tokens += ending.text_tokens


def _recent(counts: Counts) -> tuple[int, ...]:
    """Return the counts of which an announcement has recent means."""
    return (
        counts.completed, counts.completion_tokens, counts.prompt_tokens, counts.characters,
        counts.text_tokens,
    )  # fmt: skip


class Averages:
    """Recent lengths of prompts and answers, and the share of time with full slots."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        # Counts of an earlier drain of the model are not recent.
        self._before = _recent(counts)
        # Sums of the same counts, in which older answers count less.
        self._sums = [0.0] * len(self._before)
        self._full_s = self._busy_s = 0.0

    def update(self, running: int, slots: int, seconds: float) -> None:
        """Add the last `seconds`, in which `running` requests were in the engine."""
        now = _recent(self._counts)
        kept_share = (1 - 1 / ANSWERS) ** (now[0] - self._before[0])
        new = [after - before for after, before in zip(now, self._before, strict=True)]
        self._sums = [old * kept_share + n for old, n in zip(self._sums, new, strict=True)]
        self._before = now
        if running and slots:
            kept_share = 0.5 ** (seconds / HALF_LIFE_S)
            self._full_s = self._full_s * kept_share + (seconds if running >= slots else 0.0)
            self._busy_s = self._busy_s * kept_share + seconds

    def as_json(self) -> dict[str, Any]:
        """Return the known averages as an announcement has them (docs/reference/redis-keys.md)."""
        count, answers, prompts, characters, text_tokens = self._sums
        averages: dict[str, Any] = {}
        if count >= 1:
            averages["mean_answer"] = round(answers / count, 1)
            averages["mean_prompt"] = round(prompts / count, 1)
        if text_tokens >= 1 and characters:
            averages["token_characters"] = round(characters / text_tokens, 2)
        if self._busy_s:
            averages["slots_full"] = round(self._full_s / self._busy_s, 3)
        return averages
