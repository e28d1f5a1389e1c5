"""Submits a source again after Redis has lost writes, and lets a stopped batch go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from contract.batch import Batch
from contract.redis.batches import BatchStore
from contract.settings import Settings
from producer.batch_watch import WritesLost
from producer.submit.submission import Submission, change_limit
from producer.submit.submit import Submitter, Summary

if TYPE_CHECKING:  # this loads the readers of tables
    from producer.input.source import Source

#: Most times that a source is read again after Redis has lost writes.
_RETRIES = 5


@dataclass
class ResumableSubmit:
    """A submit that reads its source again if Redis has lost writes (a failover).

    Redis then has the first lines of the batch, up to its cursor; the later ones are queued again.
    `source` is closed after each reading.
    """

    store: BatchStore
    settings: Settings
    submission: Submission
    source: Source
    _submitter: Submitter = field(init=False)
    _retries_left: int = _RETRIES

    def submit(self) -> Summary:
        """Queue the requests that are not queued yet, and seal the batch. Raises as Submitter."""
        while True:
            try:
                return self._submit_once()
            except WritesLost as error:
                self._read_again(error)

    def follow(self, batch: Batch, follow: Callable[[Batch], Batch]) -> Batch:
        """Return `follow(batch)`; after lost writes, submit the lost requests and follow again.

        Raises BatchChanged if the batch is deleted or replaced, or lost lines cannot be read again.
        """
        while True:
            try:
                return follow(batch)
            except WritesLost as error:
                self._notify(f"{error.message}; sealing the batch again")
            try:
                batch = self._submitter.seal().batch
            except WritesLost as error:
                self._read_again(error)
                batch = self.submit().batch

    def _read_again(self, error: WritesLost) -> None:
        if not (self.source.repeatable and self._retries_left):  # a pipe cannot be read again
            raise error
        self._retries_left -= 1
        self._notify(f"{error.message}; submitting the rest again")
        self.source = self.source.reopen()

    def _notify(self, text: str) -> None:
        """Show a notice; user interfaces override this."""

    def _report(self, summary: Summary) -> None:
        """Show progress; user interfaces override this."""

    def _with_limit(self, batch: Batch) -> Batch:
        """Give the batch this submit's `stop_after`; let a stopped batch with another one go on."""
        batch, again = change_limit(self.store, batch, self.submission.stop_after)
        if again:
            self._notify(f"{batch.id}: goes on after the stop, {again:,} requests run again")
        return batch

    def _submit_once(self) -> Summary:
        source, submission = self.source, self.submission
        try:
            planned = submission.order != "input" and source.repeatable
            batch = submission.create(
                self.store,
                source.name,
                planned=planned,
                columns=getattr(source, "pairs", None),
                delimiter=getattr(source, "delimiter", ""),
                kept_columns=source.output_columns,
            )
            batch = self._with_limit(batch)
            self._submitter = Submitter(self.store, self.settings, submission, batch, self._report)
            return self._submitter.run(source.chunks(submission.seed, self.settings.max_line_bytes))
        finally:
            source.close()
