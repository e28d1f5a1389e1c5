"""Keeps the record of a run in Redis: its counts, its state, and whether it was cancelled."""

from dataclasses import replace

from contract.batch import Batch
from contract.errors import WarmqError
from contract.failures import failures_of, noted_codes
from contract.redis.batches import BatchStore
from contract.redis.failures import FIRST_FAILED, FailureReads
from contract.redis.runs import Runs
from contract.runs import COUNTS, joined
from producer.input.source import Source
from producer.run.journal import RunFiles, RunProgress
from producer.submit.submission import Submission

#: Fields that the record takes from the run's record before a retry.
_KEPT = (
    "created_at", "prompt_tokens", "completion_tokens", "cut", "retried", "cached", "queues",
    FIRST_FAILED,
)  # fmt: skip
#: Fields that the record takes from a collected window.
_OF_WINDOWS = (*COUNTS, "cursor", "failures", "queues")


class RunCancelled(WarmqError):
    """A run was cancelled while it ran."""

    code = "cancelled"


class RunRecord:
    """The record of a run. Its numbers of results are those of the journal.

    `earlier` is the record of a complete run before some of its lines run again.
    """

    def __init__(
        self,
        store: BatchStore,
        submission: Submission,
        source: Source,
        files: RunFiles,
        earlier: Batch | None = None,
    ) -> None:
        done = files.done
        self._runs, self._name = Runs.using(store), done.name
        self._failures = FailureReads.using(store)
        kept = earlier.fields if earlier is not None else {}
        fields = {
            **{name: kept[name] for name in _KEPT if name in kept},
            **submission.run_fields(done.name, source.name),
            **_counts(done),
            "valid": done.ended,
            **_of_retry(files, earlier),
        }
        self._record = self._runs.begin(done.name, submission.seed, fields)
        # An earlier call may have ended before it noted its last window, or was stopped.
        now = _counts(done) | {"reason": "", "stopped_at": ""}
        if self._record.fields.get("unread") == "0":
            now["unread"] = ""  # the file is read again, and windows of it may be lost
        if self._record.fields.get("stop_after", "") != submission.stop_after:
            now["stop_after"] = submission.stop_after
        self._note(now)

    @property
    def cancelled(self) -> bool:
        """Whether the run was cancelled."""
        return self._runs.cancelled(self._name)

    def check(self) -> None:
        """Raise RunCancelled if the run was cancelled."""
        if self.cancelled:
            raise RunCancelled(f"{self._name} was cancelled")

    def add(self, done: RunProgress, window: Batch | None = None) -> None:
        """Note the progress; `window` was collected last, and is deleted next."""
        fields: dict[str, str | int] = {}
        if window is not None:
            state = joined(self._record, [window])
            fields = {name: state.fields[name] for name in _OF_WINDOWS if name in state.fields}
            if window.number("failed"):
                fields |= self._failures.kept(state)
        if self.cancelled:  # until `end_record` the output of a cancelled run is not complete
            fields["unread"] = ""
        self._note(fields | _counts(done))

    def note_unread(self, lines: float | None) -> None:
        """Note about how many lines follow the queued ones, if known; 0 if the file is read."""
        if lines is not None:
            self._note({"unread": round(lines)})

    def stop(self, reason: str) -> None:
        """Note why the run was stopped; the same command continues it."""
        self._note({"reason": reason, "stopped_at": self._runs.now_ms()})

    def _note(self, fields: dict[str, str | int]) -> None:
        self._runs.note(self._record, fields)
        texts = {name: str(value) for name, value in fields.items()}
        self._record = replace(self._record, fields=self._record.fields | texts)


def end_record(store: BatchStore, done: RunProgress) -> None:
    """Note that a run has ended: its output is complete, and in its place."""
    record = store.batch(done.name)
    if record is not None:
        now = _counts(done) | {"unread": 0}
        Runs.using(store).note(record, now, ends=not record.finished)


def begin_retry(store: BatchStore, files: RunFiles) -> Batch | None:
    """Begin a retry; delete and return the record of the complete run, None if it is gone."""
    earlier = store.batch(files.done.name)
    store.delete(files.done.name, force=True)
    files.begin_retry()  # until then the same call begins the retry anew
    return earlier


def _of_retry(files: RunFiles, earlier: Batch | None) -> dict[str, str | int]:
    """Return the fields that a record has only if lines of a complete run run again.

    The error codes are those of the other lines. First requests stay for the codes of which no line
    runs again.
    """
    if not files.again:
        return {}
    retried = earlier.number("retried") if earlier is not None else 0
    before = {one.code: one for one in failures_of([earlier] if earlier is not None else [])}
    codes = list[str]()
    for code, count in noted_codes(files.kept).items():
        same = before.get(code)
        first = same.first if same is not None and same.count == count else ()
        codes.append(" ".join((code, str(count), *first)))
    fields: dict[str, str | int] = {"retried": retried + len(files.again)}
    return fields | {"failures": "\n".join(codes)} if codes else fields


def _counts(done: RunProgress) -> dict[str, str | int]:
    """Return the fields of a record that are in the journal."""
    return {
        "windows": done.windows,
        "cursor": done.line,
        "total": done.ended,
        "completed": done.completed,
        "failed": done.failed,
        "cancelled": done.cancelled,
        "expired": done.expired,
    }
