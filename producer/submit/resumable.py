"""Submits one source, and goes on by itself where Redis has lost its last writes (a failover).

What Redis still has of a batch is a beginning of it: cursor and digest say which. So the source is
read again from its start, as the same command would do, and the rest is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from contract.batch import Batch
from contract.redis.batches import BatchStore
from contract.settings import Settings
from producer.batch_watch import WritesLost
from producer.input.source import Source
from producer.submit.submission import Submission
from producer.submit.submit import Submitter, Summary

#: Times a source is read anew before the user is asked to.
_TIMES = 5


@dataclass
class ResumableSubmit:
    """One submit. `source` is closed when it was read."""

    store: BatchStore
    settings: Settings
    submission: Submission
    source: Source
    _submitter: Submitter = field(init=False)
    _tries_left: int = _TIMES

    def submit(self) -> Summary:
        """Queue what is not queued yet, and seal the batch. Raises what `Submitter` does."""
        while True:
            try:
                return self._once()
            except WritesLost as error:
                self._read_again(error)

    def follow(self, batch: Batch, follow: Callable[[Batch], Batch]) -> Batch:
        """Return what `follow` returns for the submitted batch, at its end.

        Raises:
            BatchChanged: if it is deleted or submitted anew meanwhile, or lines are lost that
                cannot be read again.
        """
        while True:
            try:
                return follow(batch)
            except WritesLost as error:
                self._notify(f"{error.message}; saying again where it ends")
            try:
                batch = self._submitter.seal().batch
            except WritesLost as error:
                self._read_again(error)
                batch = self.submit().batch

    def _read_again(self, error: WritesLost) -> None:
        """Open the source anew, or raise the error where that is not possible or did not help."""
        if not (self.source.repeatable and self._tries_left):  # a pipe's lines are gone
            raise error
        self._tries_left -= 1
        self._notify(f"{error.message}; submitting the rest again")
        self.source = self.source.reopen()

    def _notify(self, text: str) -> None:
        """Say what happens; a user interface does."""

    def _report(self, summary: Summary) -> None:
        """Show how far it is; a user interface does."""

    def _once(self) -> Summary:
        source, submission = self.source, self.submission
        try:
            planned = submission.order != "input" and source.repeatable
            batch = submission.create(self.store, source.name, planned=planned)
            self._submitter = Submitter(self.store, self.settings, submission, batch, self._report)
            return self._submitter.run(source.chunks(submission.seed, self.settings.max_line_bytes))
        finally:
            source.close()
