"""The state of one batch, as its Redis hash tells it."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from contract.results import OUTCOMES


def _iso(ms: str | None) -> str | None:
    return dt.datetime.fromtimestamp(int(ms) / 1000, dt.UTC).isoformat() if ms else None


@dataclass(frozen=True, slots=True)
class Batch:
    """A snapshot of a batch. Times are ms of Redis time, counts are requests."""

    id: str
    fields: dict[str, str]

    def number(self, name: str) -> int:
        """Return a counter, 0 if it was never touched."""
        return int(self.fields.get(name) or 0)

    @property
    def created(self) -> str:
        """The creation time in ms, as the messages of this batch carry it."""
        return self.fields["created_at"]

    @property
    def life(self) -> str:
        """A random text that its messages carry too: no other batch of this id has the same."""
        return self.fields["life"]

    @property
    def deadline(self) -> str | None:
        """When what is unfinished expires, in ISO form; None if never."""
        return _iso(self.fields.get("deadline"))

    @property
    def sealed(self) -> bool:
        """Whether all lines were submitted (or the batch was cancelled)."""
        return "sealed" in self.fields

    @property
    def finished(self) -> bool:
        """Whether every line has its terminal result."""
        return "finished_at" in self.fields

    @property
    def terminal(self) -> int:
        """How many requests have a terminal result."""
        return sum(self.number(name) for name in OUTCOMES)

    @property
    def status(self) -> str:
        """OpenAI's word for the state, or `deleting`."""
        if "deleting" in self.fields:
            return "deleting"
        if "cancelling" in self.fields:
            return "cancelled" if self.finished else "cancelling"
        if not self.sealed:
            return "validating"
        if not self.finished:
            return "in_progress"
        valid = self.number("valid")  # bad lines have no deadline: they were rejected
        if valid == 0:
            return "failed"
        return "expired" if self.number("expired") == valid else "completed"

    def as_json(self) -> dict[str, Any]:
        """Return what `status --json` prints."""
        prompt, completion = self.number("prompt_tokens"), self.number("completion_tokens")
        total = self.number("total")
        return {
            "id": self.id,
            "object": "batch",
            "status": self.status,
            "model": self.fields.get("model") or None,
            "queue": self.fields.get("queue"),
            "input_file": self.fields.get("input"),
            "created_at": _iso(self.created),
            "expires_at": self.deadline,
            "finished_at": _iso(self.fields.get("finished_at")),
            "request_counts": {"total": total}
            | {name: self.number(name) for name in OUTCOMES}
            | {"in_progress": total - self.terminal},
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
            "lines_read": self.number("cursor"),
            "reason": self.fields.get("reason"),
        }
