"""What the drain has done so far."""

from __future__ import annotations

from dataclasses import dataclass

from worker.drain.endings import Ending


@dataclass(slots=True)
class Counts:
    """Totals since the worker started; requests, and tokens of those that were completed."""

    popped: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    handed_back: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def committed(self, ending: Ending) -> None:
        """Count an ending that is in Redis; one without an outcome is no request's."""
        match ending.outcome:
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
