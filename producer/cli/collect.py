"""Collects a batch's results into files or stdout, and shows the progress.

A file's mark is the size and digest of what was written. Redis keeps the marks, so that a later
collection can recognise the files and replace them.
"""

import os
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from contract.batch import Batch
from contract.errors import StoreUnavailable
from contract.failures import unanswered_text
from contract.redis.batches import BatchStore
from contract.results import ResultLine
from producer.cli.progress import Meter, SubmitPause, counted, tell, unsealed
from producer.collect.collect import Collector
from producer.collect.columns import OutputColumns
from producer.collect.outputs import (
    ResultFile,
    check_output,
    error_file_of,
    exists,
    replaceable,
    table_ending,
)
from producer.input.bucket import is_url, redacted
from producer.input.files import OutputUnwritable, check_writable, write_failed
from producer.queue_workers import BatchWorkers


class Collected(NamedTuple):
    """The numbers of result lines, and the file with the failed ones.

    `errors_file` is None if none failed, or if they went to stdout or into a table of all rows.
    """

    completed: int
    failed: int
    errors_file: str | None


class _Progress:
    """Counts result lines, and shows the numbers on a meter."""

    collector: Collector

    def __init__(self, meter: Meter, workers: BatchWorkers) -> None:
        self._meter, self._workers, self._pause = meter, workers, SubmitPause()
        self.completed = self.failed = 0
        #: Outcome -> number of lines in `failed`.
        self._outcomes = Counter[str]()

    def lines(self, order: str) -> Iterator[ResultLine]:
        """Yield the collector's lines; each is counted when the next one is requested."""
        for line in self.collector.lines(order):
            yield line
            if line.failed:
                self.failed += 1
                self._outcomes[line.outcome] += 1
            else:
                self.completed += 1
            if self._meter.due():
                self.show()

    def show(self, waiting: str = "") -> None:
        """Show the counts now."""
        count = self.completed + self.failed
        self._meter.update(count, f"{count} results, {self.failures()}{waiting}")

    def failures(self) -> str:
        """Return a text with the numbers of failed, cancelled and expired requests."""
        return unanswered_text(self._outcomes)

    def wait(self, seconds: float) -> None:
        """Sleep, and show the reason why results are missing."""
        batch = self.collector.batch
        quiet_s = self._pause.add(batch)
        if self._meter.due():
            reason = self._workers.text(batch) if batch.sealed else unsealed(batch, quiet_s)
            self.show(f"; waiting, {reason}")
        time.sleep(seconds)


def collect(
    store: BatchStore,
    batch: Batch,
    order: str,
    output: str | None,
    errors: str | None,
    *,
    follow: bool = False,
    partial: bool = False,
    force: bool = False,
) -> Collected:
    """Write a batch's results, in input or completion order, to files or stdout (see `write`).

    `follow` waits for missing results, `partial` leaves them out, `force` replaces any file. Raises
    BatchChanged and OutputUnwritable; then no file appears.
    """

    def before_commit(marks: list[str]) -> None:
        if marks and not force:  # another program may have changed a file meanwhile
            current = store.batch(batch.id) or batch
            check_replaced(output, errors, batch.id, current.written)
        if marks:
            with suppress(StoreUnavailable):  # Redis is full, or its user may not write
                store.note_written(batch, marks)

    with Meter(batch.id, batch.number("total")) as meter:
        progress = _Progress(meter, BatchWorkers(store))
        collector = Collector(store, batch, follow=follow, partial=partial, sleep=progress.wait)
        progress.collector = collector
        columns = OutputColumns.of(batch)
        tell_renamed(columns, output, errors)
        errors_file = write(progress.lines(order), columns, output, errors, before_commit)
        collector.mark_collected()
        progress.show()
    text = f"{batch.id}: {counted(progress.completed, 'result')}, {progress.failures()}"
    if partial:
        text += f", of {counted(collector.batch.number('total'), 'request')}"
    tell(text + (f", see {errors_file}" if errors_file else ""))
    return Collected(progress.completed, progress.failed, errors_file)


def tell_renamed(columns: OutputColumns, *outputs: str | None) -> None:
    """Print which columns have another name in the outputs, if one is a table."""
    if not (columns.renamed and any(name and table_ending(name) for name in outputs)):
        return
    new_names = {f"column {name} is kept as": (name, new) for name, new in columns.kept.items()}
    new_names |= {
        f"property {name} is the column": (name, new)
        for name, (new, _) in columns.properties.items()
    }
    for what, (name, new) in new_names.items():
        if new != name:
            taken = "text is the answer" if name == "text" else f"another column is called {name}"
            tell(f"{what} {new}, because {taken}")


def write(
    lines: Iterator[ResultLine],
    columns: OutputColumns,
    output: str | None,
    errors: str | None,
    before_commit: Callable[[list[str]], None],
) -> str | None:
    """Write result lines to files, which appear when complete, or to stdout (None or `-`).

    A table has all lines. If `output` is no table and `errors` is None, failed requests go to
    stdout if the results do, otherwise to a file next to `output`. `before_commit` gets the
    marks of the written files. Returns the name of the file with failed requests, None without one.
    """
    with ExitStack() as files:
        good = (
            files.enter_context(ResultFile(output, columns=columns))
            if output and output != "-"
            else None
        )
        bad = files.enter_context(ResultFile(errors, columns=columns)) if errors else None
        default = error_file_of(output) if output and good and not bad else None
        if default is not None and exists(default):
            # An earlier collection wrote this file, which is replaced also if no request failed.
            bad = files.enter_context(ResultFile(default, columns=columns))
        add_good = good.add if good else _write_to_stdout
        has_all = bool(good and output and table_ending(output))
        any_failed = False
        for line in lines:
            if not line.failed or has_all:
                add_good(line)
            if not line.failed:
                continue
            any_failed = True
            if bad is None and default is not None:
                bad = files.enter_context(ResultFile(default, columns=columns))
            if bad is not None or not has_all:
                (bad.add if bad else add_good)(line)
        # All files are on disk before the first one appears.
        before_commit([file.sync() for file in (good, bad) if file is not None])
        return (errors or default) if any_failed and bad is not None else None


def _write_to_stdout(line: ResultLine) -> None:
    if sys.stdout is None:
        raise OutputUnwritable("standard output is closed, and the results go there")
    try:
        sys.stdout.buffer.write(line.json + b"\n")
        sys.stdout.buffer.flush()  # a reader gets each line immediately
    except BrokenPipeError:
        raise  # the command exits 0 on a closed pipe
    except OSError as error:
        raise write_failed("standard output", error) from None


def check_outputs(
    output: str | None,
    errors: str | None,
    file: str | None = None,
    journal: Path | None = None,
    *,
    force: bool = False,
) -> None:
    """Raise OutputUnwritable if a file cannot be written, or if two names mean one file.

    `file` is the input, `-` for stdin. A terminal may be named twice, because it keeps no data.
    """
    output = output or "-"
    if not (Path(output).name or is_url(output)):
        check_writable(Path(output))  # `.` and `/` have no name to derive an error file from
    default = None if output == "-" else error_file_of(output)
    purpose_of: dict[object, str] = {}
    for purpose, name, standard in (
        ("the input", file, 0), ("the output", output, 1),
        ("the error file", errors or default, 1), ("the journal", journal, 1),
    ):  # fmt: skip
        place = _file_identity(name, standard) if name is not None else None
        if place in purpose_of:
            raise OutputUnwritable(
                f"{purpose_of[place]} and {purpose} are the same file, {redacted(str(name))}; "
                "name another file"
            )
        if place is not None:
            purpose_of[place] = purpose
        if name not in (None, "-", file):
            check_output(str(name)) if purpose != "the journal" else check_writable(Path(name))
    if force and default is not None and not errors:
        exists(default)  # called only for a bucket's error, which comes before the work then


def check_replaced(
    output: str | None, errors: str | None, batch_id: str, written: Collection[str] = ()
) -> None:
    """Raise OutputUnwritable if a file exists and its mark is not in `written`."""
    default = error_file_of(output) if output and output != "-" else None
    for name in (output, errors or default):
        if not name or name == "-" or not (exists(name) if is_url(name) else Path(name).is_file()):
            continue
        if not replaceable(name, written):
            what = f", and its content is not what a collection of batch {batch_id} wrote"
            raise OutputUnwritable(
                f"{name} exists{what * bool(batch_id)}; name another file, or replace it with "
                f"--force{', which loses what was added or changed since' * bool(written)}"
            )


def _file_identity(name: str | Path, standard: int) -> object:
    """Return a value that is equal for all names of a file; None for a terminal or pipe.

    The name `-` means the file descriptor `standard`.
    """
    if is_url(str(name)):
        return str(name)
    try:
        state = os.fstat(standard) if name == "-" else Path(name).stat()
    except OSError:
        return os.path.realpath(name)  # it does not exist yet
    if stat.S_ISCHR(state.st_mode) or (name == "-" and not stat.S_ISREG(state.st_mode)):
        return None
    return state.st_dev, state.st_ino
