"""Joins the windows of a run, which are batches, for a list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from contract.batch import Batch

#: The id of a run's window (`window_id`): the run's name and the number of the window.
_WINDOW = re.compile(r"(run_[0-9a-f]{16})\.\d+")


@dataclass(frozen=True, slots=True)
class ListEntry:
    """A batch, or the windows of one run that Redis has, newest first."""

    id: str
    batches: tuple[Batch, ...]

    @property
    def newest(self) -> Batch:
        """The batch itself, or the newest window."""
        return self.batches[0]

    @property
    def of_run(self) -> bool:
        """Whether these are windows of a run."""
        return self.id != self.newest.id

    @property
    def status(self) -> str:
        """The status of the oldest unfinished window; without one, that of the newest window.

        A run deletes the windows that it has collected. So a run whose windows are all completed
        is in progress.
        """
        unfinished = [batch for batch in self.batches if not batch.finished]
        if not unfinished and self.of_run and self.newest.status == "completed":
            return "in_progress"
        return (unfinished or self.batches)[-1 if unfinished else 0].status

    @property
    def waits_for_run(self) -> bool:
        """Whether all lines that a run has queued are done, so that its command must go on."""
        return self.of_run and all(batch.status == "completed" for batch in self.batches)

    @property
    def total(self) -> int:
        """Number of requests; for a run, the number of its lines so far."""
        return self._before + sum(batch.number("total") for batch in self.batches)

    @property
    def done(self) -> int:
        """Number of requests that completed or failed; for a run, also in windows that are gone."""
        return self._before + self.failed + sum(b.number("completed") for b in self.batches)

    @property
    def failed(self) -> int:
        """Number of failed requests in the batches that Redis has."""
        return sum(batch.number("failed") for batch in self.batches)

    @property
    def _before(self) -> int:
        """Lines before the oldest window: a window's cursor counts from the file's beginning."""
        oldest = self.batches[-1]
        return max(0, oldest.number("cursor") - oldest.number("total")) if self.of_run else 0


def run_of(batch_id: str) -> str:
    """Return the name of the run whose window has this id; '' for another batch."""
    found = _WINDOW.fullmatch(batch_id)
    return found[1] if found else ""


def window_ids(ids: Iterable[str], run: str) -> list[str]:
    """Return the ids of a run's windows, the oldest first."""
    found = [one for one in ids if run and run_of(one) == run]
    return sorted(found, key=lambda one: int(one.rpartition(".")[2]))


def join_windows(batches: Iterable[Batch]) -> Iterator[ListEntry]:
    """Yield the batches in their order; a run's windows are one entry, at the first's place."""
    together: dict[str, list[Batch]] = {}
    for batch in batches:
        together.setdefault(run_of(batch.id) or batch.id, []).append(batch)
    for name, found in together.items():
        yield ListEntry(name, tuple(found))
