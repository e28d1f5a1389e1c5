"""Reads and writes the files of a run: output, error file, and the journal of its progress."""

import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import msgspec
import orjson

from contract import naming
from contract.errors import BatchConflict
from contract.failures import unanswered_text
from contract.results import ResultLine
from producer.input.files import AtomicFile, unwritable
from producer.run.again import UNANSWERED, failed_lines, write_without
from producer.run.append_file import AppendFile, check_regular, sort_by_line

#: Numbers of the formats of a journal, and of one in which lines run again. A journal with another
#: format is refused.
FORMAT, RETRY_FORMAT = 2, 3


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Content of the journal: how much of the input is in the output.

    A window is a part of the input that is submitted as one batch.

    name: name of the run; the id of a window's batch is this name and a number.
    digest: digest of the input up to `line`.
    input, fingerprint: name and fingerprint of the input.
    errors_file: the error file, relative to the output's folder.
    line: number of the last line whose result is in the files.
    windows: number of windows whose results are in the files.
    output, errors: bytes of the output and of the error file.
    completed, failed, cancelled, expired: numbers of results in the files.
    complete: whether the results of all lines are in the files.
    plan: name of the order in which the run takes the lines, '' for the input's order. With a
        name, `line` counts in that order, and the files have it until the run is complete.
    delivered: digest of the options, after Export has written the results to their final place.
    place: fingerprint of the output at its final place.
    retry: outcomes of the lines of a complete run that run again, joined by commas; '' for none.
        All other fields are then those of the retry, whose windows are numbered on, and `before`
        is the progress before it.
    """

    name: str
    digest: str
    input: str
    fingerprint: str
    errors_file: str
    line: int = 0
    windows: int = 0
    output: int = 0
    errors: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    complete: bool = False
    plan: str = ""
    delivered: str = ""
    place: str = ""
    retry: str = ""
    before: "RunProgress | None" = None
    format: int = FORMAT

    @property
    def ended(self) -> int:
        """Number of results in the files."""
        return self.completed + self.failed + self.cancelled + self.expired

    @property
    def done(self) -> int:
        """Number of lines that completed or failed, as in all lists (Batch.done)."""
        return self.completed + self.failed

    @property
    def done_text(self) -> str:
        """The numbers of lines done, of failed ones among these, and of those that did not run."""
        lines = f"{self.done} {'line' if self.done == 1 else 'lines'} done ({self.failed} failed)"
        return ", ".join([lines, *(f"{n} {name}" for name, n in self._stopped.items())])

    @property
    def unanswered(self) -> str:
        """The numbers of failed, cancelled and expired requests as a text."""
        return unanswered_text({"failed": self.failed} | self._stopped)

    @property
    def _stopped(self) -> dict[str, int]:
        """The numbers of lines that did not run, without those that are 0."""
        stopped = {"cancelled": self.cancelled, "expired": self.expired}
        return {name: number for name, number in stopped.items() if number}


class _Format(msgspec.Struct):
    """Fields of journals of all formats."""

    name: str
    format: int = 1  # the first format did not have this field


def window_id(name: str, window: int) -> str:
    """Return the batch id of a run's window, counted from 0 (contract/lua/run_state.lua)."""
    return f"{name}.{window}"


class Journal:
    """The journal of a run: a file next to its output, which stays when the run is complete."""

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(f"{output.name}.progress")
        self._output = output

    @property
    def start_anew(self) -> str:
        """The remedy for a run that cannot continue."""
        return f"remove {self._output}, its error file and {self.path.name} to start again"

    def read(self) -> RunProgress | None:
        """Return the progress of an earlier run; None if the journal does not exist."""
        check_regular(self.path)
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unwritable(self.path, error) from None
        try:
            found = msgspec.json.decode(raw, type=_Format)
            if found.format in (FORMAT, RETRY_FORMAT):
                return msgspec.json.decode(raw, type=RunProgress)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BatchConflict(
                f"{self.path} is not a journal of a run ({error}); move it, or name another output"
            ) from None
        raise BatchConflict(
            f"{self.path} was written by another version of warmq (its format is {found.format}, "
            f"this version's is {FORMAT}); go on with that version, or {self.start_anew}"
        )

    def write(self, done: RunProgress, *, new: bool = False) -> None:
        """Replace the journal on disk; with `new`, raise BatchConflict if it exists."""
        try:
            with AtomicFile(self.path, new=new) as file:
                file.write(orjson.dumps(asdict(done)))
        except BatchConflict:
            raise BatchConflict(f"another run has just written {self._output}") from None


#: Fields that a complete retry leaves in the journal.
_OF_RETRY = ("windows", "output", "completed", *UNANSWERED)


class RunFiles:
    """Opens the files of a run, and appends windows to them.

    `begin` is the content of a new run's journal. With `retry`, outcomes joined by commas, lines of
    a complete run run again; `again` has their outcomes, `kept` counts the error codes of the other
    failed lines. If `begins_retry`, the journal does not have the retry yet. Raises BatchConflict
    if the files are not of this run, or another process is writing them.
    """

    def __init__(self, output: Path, errors: Path, begin: RunProgress, retry: str = "") -> None:
        check_regular(output)
        check_regular(errors)
        self._output, self._errors = (Path(os.path.realpath(path)) for path in (output, errors))
        errors_file = os.path.relpath(self._errors, self._output.parent)
        self._begin = replace(begin, errors_file=_text(errors_file), input=_text(begin.input))
        self._stack = ExitStack()
        self.journal = Journal(self._output)
        self.done = self._begin
        self.again, self.begins_retry = dict[int, str](), False
        self.kept = Counter[str]()
        self._retry = retry
        self._merged = self._errors.with_name(f"{self._errors.name}.retry")

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            if self.done.complete:  # removes an error file that was created by opening it
                self.finish()

    def _open(self, stack: ExitStack) -> None:
        found = earlier = self.journal.read()
        if earlier is not None and earlier.complete and not self._output.exists():
            earlier = None  # the output was removed, so this is a new run
        if earlier is None and self._retry:
            raise BatchConflict(
                f"no run has written {self._output} yet, so there are no lines to run again"
            )
        if earlier is None:
            _refuse_existing(self._output, "", may_be_empty=True)
            _refuse_existing(self._errors, " error file", may_be_empty=False)
        else:
            self._check_same(earlier)
        # Some network folders do not lock between machines, but none creates a name twice.
        new = earlier is None and not self._output.exists()
        self._out = stack.enter_context(AppendFile(self._output, new=new))
        if self.journal.read() != found:
            raise BatchConflict(f"another run has just written {self._output}")
        if earlier is None:
            self.journal.write(self._begin, new=found is None)
        self.done = done = self._with_retry(earlier, self._retry) if earlier else self._begin
        self._bad = stack.enter_context(AppendFile(self._errors))
        try:
            for file, size in ((self._out, done.output), (self._bad, done.errors)):
                file.continue_at(size, self._is_next)
        except BatchConflict as error:
            raise self._conflict(f"{error.message}; put it back as it was") from None

    def _with_retry(self, earlier: RunProgress, retry: str) -> RunProgress:
        """Return the progress of a retry that begins or goes on; without one, `earlier`."""
        if earlier.complete and self._merged.exists():  # stopped before the last step of a retry
            self._merged.replace(self._errors)
        if retry and not (earlier.complete or earlier.retry):
            raise BatchConflict(
                f"the run that writes {self._output} is not complete: let it end first, then run "
                "its failed lines again"
            )
        before, retry = earlier.before or earlier, earlier.retry or retry
        if not retry:
            return earlier
        self.again = failed_lines(self._errors, before.errors, retry.split(","), self.kept)
        if earlier.retry or not self.again:
            return earlier
        counts = Counter(self.again.values())
        left = {name: getattr(before, name) - counts[name] for name in UNANSWERED}
        self.begins_retry = True
        return replace(
            self._begin, name=before.name, windows=before.windows, output=before.output,
            errors=before.errors, completed=before.completed, retry=retry, before=before,
            format=RETRY_FORMAT, **left,
        )  # fmt: skip

    def begin_retry(self) -> None:
        """Write to the journal that lines run again."""
        self.journal.write(self.done)

    def _check_same(self, earlier: RunProgress) -> None:
        """Raise BatchConflict if input or error file differ, or results are missing."""
        if earlier.errors_file != self._begin.errors_file:
            where = os.path.normpath(self._output.parent / earlier.errors_file)
            raise BatchConflict(
                f"the failed requests of the run that wrote {self._output} are in {where}",
                remedy="name_error_file",
                errors_file=where,
                start_anew=self.journal.start_anew,
            )
        if earlier.fingerprint != self._begin.fingerprint:
            raise self._conflict(
                f"{self._output} is of a run of another input, or its input ({earlier.input}) has "
                "changed: give the same one"
            )
        for path, size in ((self._output, earlier.output), (self._errors, earlier.errors)):
            if size and not path.exists():
                raise self._conflict(
                    f"results are missing: there is no {path} any more; put it back as it was"
                )

    def _conflict(self, problem: str) -> BatchConflict:
        return BatchConflict(f"{problem}, or {self.journal.start_anew}")

    def _is_next(self, line: bytes) -> bool:
        """Return whether a line is a result of the first window that is not in the journal."""
        return _is_result_of(line, window_id(self.done.name, self.done.windows))

    def add(self, line: ResultLine) -> None:
        """Append a result to its file."""
        (self._bad if line.failed else self._out).write(line.json + b"\n")

    def commit(self, done: RunProgress) -> None:
        """Flush the added lines to disk, then write the journal."""
        output, errors = self._out.sync(), self._bad.sync()
        done = replace(done, output=output, errors=errors)
        self.journal.write(done)
        self.done = done

    def settle_plan(self, name: str) -> None:
        """Write the name of the lines' order to the journal, before the first line is queued."""
        self.done = replace(self.done, plan=name)
        self.journal.write(self.done)

    def finish(self) -> None:
        """Write to the journal that the run is complete; sort the files, remove an empty one."""
        if self.done.before is not None:
            self._finish_retry(self.done, self.done.before)
            return
        if self.done.plan and not self.done.complete:
            # An interrupted sort is repeated by the next run: the files' sizes do not change.
            for path in (self._output, self._errors):
                sort_by_line(path)
        if not self.done.errors:
            self._errors.unlink(missing_ok=True)
        if not self.done.complete:
            self.journal.write(replace(self.done, complete=True))

    def _finish_retry(self, done: RunProgress, before: RunProgress) -> None:
        """Put the new results in the places of the old ones; write that the run is complete."""
        size = write_without(self._errors, before.errors, self.again, self._merged)
        for path in (self._output, self._merged):
            sort_by_line(path)
        counts = {name: getattr(done, name) for name in _OF_RETRY}
        # `place` stays, so that Export knows the output that it replaces.
        end = replace(before, errors=size, delivered="", complete=True, **counts)
        self.journal.write(end)
        self._merged.replace(self._errors)
        if not size:
            self._errors.unlink()
        self.done = replace(end, complete=False)


def _refuse_existing(path: Path, what: str, *, may_be_empty: bool) -> None:
    """Raise BatchConflict for a file that no run has written."""
    if path.exists() and not (may_be_empty and path.stat().st_size == 0):
        raise BatchConflict(f"{path} exists; remove it, or name another{what}")


def _text(name: str) -> str:
    return os.fsencode(name).decode(errors="backslashreplace")


_RESULT_START = b'{"id":"batch_req_'


def _is_result_of(line: bytes, batch_id: str) -> bool:
    """Return whether a line is a result of the batch, or the beginning of an incomplete result."""
    if not line.endswith(b"\n"):
        return line[: len(_RESULT_START)] == _RESULT_START[: len(line)]
    try:
        result = orjson.loads(line)
        number = (result["error"] or result["warmq"])["line"]
        custom_id, own_id = str(result["custom_id"]), result["id"].removeprefix("batch_req_")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        return False
    return own_id in (
        naming.request_id(batch_id, custom_id),
        naming.line_request_id(batch_id, number),
    )
