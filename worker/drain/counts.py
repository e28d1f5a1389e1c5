"""What the drain has done so far."""

from typing import Any

from worker.drain.events import Committed, Events, HandedBack, Leased

#: How a request can end that has a result.
OUTCOMES = ("completed", "failed", "cancelled", "expired")


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
