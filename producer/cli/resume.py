"""A submit that goes on by itself where Redis has lost its last writes, as after a failover.

What Redis still has of a batch is a beginning of it: cursor and digest say which. So the
file is read again from its start, as the same command would do, and the rest is queued.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from contract.batch import Batch
from contract.redis.batches import BatchStore
from contract.settings import Settings
from producer.cli import progress
from producer.cli.progress import Meter, tell
from producer.core.reader import Input, chunks
from producer.core.same_batch import WritesLost
from producer.core.submission import Submission
from producer.core.submit import Submitter, Summary

#: Times a file is read anew before the user is asked to.
_TIMES = 5


@dataclass(slots=True)
class ResumingSubmit:
    """Submits one file; `source` is closed when it was read."""

    store: BatchStore
    settings: Settings
    submission: Submission
    source: Input
    _submitter: Submitter = field(init=False)
    _tries_left: int = _TIMES

    def submit(self) -> Summary:
        """Queue what is not queued yet, and seal the batch. Raises what `Submitter` does."""
        while True:
            try:
                return self._once()
            except WritesLost as error:
                self._read_again(error)

    def watched(self, batch: Batch) -> Batch:
        """Follow the submitted batch to its end; return its last state.

        Raises:
            BatchChanged: if it is deleted or submitted anew meanwhile, or lines are lost that
                cannot be read again.
        """
        while True:
            try:
                return progress.watch(self.store, batch, may_reopen=False)
            except WritesLost as error:
                tell(f"{error.message}; saying again where it ends")
                batch = self._sealed_again()

    def _sealed_again(self) -> Batch:
        try:
            return self._submitter.seal().batch
        except WritesLost as error:
            self._read_again(error)
        return self.submit().batch

    def _read_again(self, error: WritesLost) -> None:
        """Open the file anew, or raise the error where that is not possible or did not help."""
        if self.source.size is None or not self._tries_left:  # a pipe's lines are gone
            raise error
        self._tries_left -= 1
        tell(f"{error.message}; submitting the rest again")
        self.source = Input(self.source.name)

    def _once(self) -> Summary:
        source, submission = self.source, self.submission
        with Meter(submission.batch_id, source.size) as meter:
            waited = False

            def report(summary: Summary) -> None:
                nonlocal waited
                text = f"{summary.lines} lines read"
                if summary.waiting:
                    text += f", waiting: {summary.waiting}"
                meter.update(source.position, text, at_once=bool(summary.waiting) and not waited)
                waited = bool(summary.waiting)

            try:
                batch = submission.create(self.store, source.name)
                self._submitter = Submitter(self.store, self.settings, submission, batch, report)
                seed, limit = submission.seed, self.settings.max_line_bytes
                return self._submitter.run(chunks(source.lines(), seed, limit))
            finally:
                source.close()
