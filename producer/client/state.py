"""What a batch's state is at one moment."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from contract.batch import Batch


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """A batch at one moment. Counts are requests; times are Redis'.

    `status` is OpenAI's word: validating (still submitted), in_progress, completed, failed (no
    valid request; `reason` says why), expired, cancelling, cancelled.
    """

    id: str
    status: str
    total: int
    completed: int
    failed: int
    cancelled: int
    expired: int
    prompt_tokens: int
    completion_tokens: int
    created_at: dt.datetime
    finished_at: dt.datetime | None
    reason: str

    @property
    def finished(self) -> bool:
        """Whether every request has its result."""
        return self.finished_at is not None

    @property
    def pending(self) -> int:
        """Requests that wait or run."""
        return self.total - self.completed - self.failed - self.cancelled - self.expired


def status_of(batch: Batch) -> BatchStatus:
    """Return a snapshot as programs see it."""
    return BatchStatus(
        batch.id,
        batch.status,
        total=batch.number("total"),
        completed=batch.number("completed"),
        failed=batch.number("failed"),
        cancelled=batch.number("cancelled"),
        expired=batch.number("expired"),
        prompt_tokens=batch.number("prompt_tokens"),
        completion_tokens=batch.number("completion_tokens"),
        created_at=_moment(batch.created),
        finished_at=_moment(batch.fields["finished_at"]) if batch.finished else None,
        reason=batch.fields.get("reason", ""),
    )


def _moment(ms: str) -> dt.datetime:
    return dt.datetime.fromtimestamp(int(ms) / 1000, dt.UTC)
