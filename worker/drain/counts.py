"""What the drain has done so far."""

from typing import Any

from worker.drain.events import Committed, Events, HandedBack, Leased

#: Over how many answers their mean length goes.
ANSWERS = 1000
#: After so many seconds of work a second counts half in the share of those with full slots.
HALF_LIFE_S = 600.0


class Counts:
    """Totals since the worker started; requests, and tokens of those that were completed."""

    def __init__(self, events: Events) -> None:
        self.popped = self.handed_back = 0
        self.completed = self.failed = self.cancelled = self.expired = 0
        self.prompt_tokens = self.completion_tokens = 0
        events.subscribe(Leased, self._leased)
        events.subscribe(HandedBack, self._handed_back)
        events.subscribe(Committed, self._committed)

    @property
    def ended(self) -> int:
        """Requests that have a result, of whatever kind."""
        return self.completed + self.failed + self.cancelled + self.expired

    def as_json(self) -> dict[str, Any]:
        """Return what `inspect stats` shows."""
        return dict(vars(self))

    def _leased(self, event: Leased) -> None:
        self.popped += len(event.deliveries)

    def _handed_back(self, event: HandedBack) -> None:
        self.handed_back += len(event.deliveries)

    def _committed(self, event: Committed) -> None:
        for ending in event.endings:
            match ending.outcome:  # one without an outcome is no request's
                case "completed":
                    self.completed += 1
                case "failed":
                    self.failed += 1
                case "cancelled":
                    self.cancelled += 1
                case "expired":
                    self.expired += 1
            self.prompt_tokens += ending.prompt_tokens
            self.completion_tokens += ending.completion_tokens


class Means:
    """What is usual here lately: lengths of prompts and answers, and how often slots are full."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._before = (0, 0, 0)
        self._answers = [0.0] * 3  # how many, their tokens, their prompts'; the latest count most
        self._full = self._worked = 0.0  # seconds with full slots, and with any work

    def look(self, running: int, slots: int, seconds: float) -> None:
        """Take in what was done since the last look, in which so many requests were running."""
        counts = self._counts
        now = (counts.completed, counts.completion_tokens, counts.prompt_tokens)
        keep = (1 - 1 / ANSWERS) ** (now[0] - self._before[0])
        new = [after - before for after, before in zip(now, self._before, strict=True)]
        self._answers = [a * keep + b for a, b in zip(self._answers, new, strict=True)]
        self._before = now
        if running and slots:
            keep = 0.5 ** (seconds / HALF_LIFE_S)
            self._full = self._full * keep + (seconds if running >= slots else 0.0)
            self._worked = self._worked * keep + seconds

    def as_json(self) -> dict[str, Any]:
        """Return what is announced (docs/reference/redis-keys.md), as far as it is known."""
        count, answers, prompts = self._answers
        found: dict[str, Any] = {}
        if count >= 1:
            found |= {"mean_answer": round(answers / count, 1)}
            found |= {"mean_prompt": round(prompts / count, 1)}
        if self._worked:
            found["slots_full"] = round(self._full / self._worked, 3)
        return found
