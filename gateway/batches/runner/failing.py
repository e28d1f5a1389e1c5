"""Batches at which this gateway fails: they are tried again, and then they end."""

from __future__ import annotations

import logging

from gateway.batches.api.record import ENDED, Problem
from gateway.batches.runner.carried import Carried

log = logging.getLogger(__name__)

#: A batch is tried so often, at each stage of its end.
TRIES = 3
#: Batches whose failures are remembered.
_MOST = 1000


class Failures:
    """Counts how often this process has failed at each batch."""

    def __init__(self) -> None:
        self._tries: dict[str, int] = {}

    def add(self, batch_id: str) -> int:
        """Count a failure; return how many there were."""
        tries = self._tries.pop(batch_id, 0) + 1
        while len(self._tries) >= _MOST:
            self._tries.pop(next(iter(self._tries)))
        self._tries[batch_id] = tries
        return tries

    def forget(self, batch_id: str) -> None:
        """Say that a batch went on, or has ended."""
        self._tries.pop(batch_id, None)


def end(batch: Carried, error: BaseException, tries: int) -> bool:
    """Bring a batch nearer to its end, after so many tries or at its deadline; return whether there
    is nothing more to do for it.

    One of which nothing is queued fails. What is queued is cancelled first, and its results are
    written; if that fails, too, the batch fails without them.
    """
    record = batch.record
    if tries < TRIES and not batch.late:
        return False
    if record.status in ENDED:  # what is done after its end fails
        return tries >= 3 * TRIES
    told = (
        f"the batch could not be processed: this gateway failed {tries} times "
        f"({type(error).__name__}), its log says at what; send the batch again, or another file"
    )
    problems = record.problems or [Problem("internal_error", told)]
    if not record.parts:
        batch.write("cancelled" if record.status == "cancelling" else "failed", problems=problems)
    elif tries < 2 * TRIES and record.status == "in_progress":
        batch.write("cancelling", problems=problems)
    elif tries >= 2 * TRIES:
        store = batch.services.batches
        for state in store.states([part.batch_id for part in record.parts]):
            if state is not None and not state.finished:
                store.cancel(state)
        batch.write("failed", problems=problems)
    return False
