"""A submit that goes on by itself where Redis has lost its last writes, as after a failover.

What Redis still has of a batch is a beginning of it: cursor and digest say which. So the
file is read again from its start, as the same command would do, and the rest is queued.
"""

from __future__ import annotations

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


class ResumingSubmit:
    """Submits one file; `source` is closed when it was read."""

    def __init__(
        self, store: BatchStore, settings: Settings, submission: Submission, source: Input
    ) -> None:
        self._store = store
        self._settings = settings
        self._submission = submission
        self._source = source
        self._readable_again = source.size is not None  # a pipe's lines are gone
        self._left = _TIMES

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
                return progress.watch(self._store, batch, may_reopen=False)
            except WritesLost as error:
                tell(f"{error.happened}; saying again where it ends")
                batch = self._sealed_again()

    def _sealed_again(self) -> Batch:
        try:
            return self._submitter.seal().batch
        except WritesLost as error:
            self._read_again(error)
        return self.submit().batch

    def _read_again(self, error: WritesLost) -> None:
        """Open the file anew, or raise the error where that is not possible or did not help."""
        if not self._readable_again or not self._left:
            raise error
        self._left -= 1
        tell(f"{error.happened}; submitting the rest again")
        self._source = Input(self._source.name)

    def _once(self) -> Summary:
        source, submission = self._source, self._submission
        with Meter(submission.batch_id, source.size) as meter:
            waited = False

            def report(summary: Summary) -> None:
                nonlocal waited
                text = f"{summary.lines} lines read"
                if summary.waiting:
                    text += f", waiting: {summary.waiting}"
                meter.update(source.position, text, at_once=bool(summary.waiting) and not waited)
                waited = bool(summary.waiting)

            self._submitter = submitter = Submitter(self._store, self._settings, submission, report)
            try:
                submitter.create(source.name)
                seed, limit = submission.seed, self._settings.max_line_bytes
                return submitter.run(chunks(source.lines(), seed, limit))
            finally:
                source.close()
