"""Estimates the time left of a run: of its windows in Redis, and of the lines not yet read."""

from __future__ import annotations

import time
from collections.abc import Sequence

from contract.batch import Batch
from contract.redis.batches import BatchStore
from producer.time_left import OutlookReads, Work

#: Seconds between two estimates.
EVERY_S = 5.0


class RunTimeLeft:
    """Estimates the seconds to the end of a run again every EVERY_S."""

    def __init__(self, store: BatchStore, queue: str) -> None:
        self._reads = OutlookReads.using(store)
        self._store, self._queue = store, queue
        self._estimate_at = -EVERY_S
        self._left_s: float | None = None
        #: Requests that have ended in the newest windows, and their tokens.
        self._ended = (0, 0)

    def seconds(self, windows: Sequence[str], unread: float | None) -> float | None:
        """Return the seconds left, with `unread` lines after the windows; None if unknown."""
        now = time.monotonic()
        if now - self._estimate_at >= EVERY_S:
            self._estimate_at = now
            self._left_s = None if unread is None else self._estimate(windows, round(unread))
        return self._left_s

    def _estimate(self, windows: Sequence[str], unread: int) -> float | None:
        batches = [batch for batch in self._store.states(windows) if batch is not None]
        works = [Work.of(batch) for batch in batches]
        if any(work.several for work in works):
            return self._of_several(batches[-1], sum(work.left for work in works), unread)
        outlook = self._reads.outlooks([self._queue])[self._queue]
        if not works or outlook is None:
            return None
        if done := sum(work.done for work in works):
            self._ended = done, sum(work.tokens for work in works)
        done, tokens = self._ended
        left = unread + sum(work.left for work in works)
        return outlook.seconds_left(works[0]._replace(left=left, done=done, tokens=tokens))

    def _of_several(self, batch: Batch, queued: int, unread: int) -> float | None:
        """Return the seconds of lines in several queues; the windows share a list in each queue."""
        left_s = self._reads.batch_seconds_left(batch)
        return left_s * (queued + unread) / queued if left_s and queued else None


def unread_lines(read: int, queued: int, position: int, size: int | None) -> float | None:
    """Return about how many lines follow the `queued` ones, at least one; None if unknown.

    The `read` lines are the input up to byte `position` of `size`.
    """
    return max(1.0, read * size / position - queued) if size and position else None
