"""Collects a batch's results into files or standard output, and shows how far it is."""

import os
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from contract.batch import Batch
from contract.errors import StoreUnavailable
from contract.redis.batches import BatchStore
from contract.results import ResultLine
from producer.cli.progress import Meter, SubmitPause, counted, tell, unsealed
from producer.collect.collect import Collector
from producer.collect.outputs import ResultFile, check_output, exists, may_go
from producer.collect.outputs import beside as beside_of
from producer.input.bucket import is_url, redacted
from producer.input.files import OutputUnwritable, check_writable, write_failed
from producer.queue_workers import QueueWorkers


@dataclass(slots=True)
class Collected:
    """How many lines went where. `errors_file` is where failed requests are, if in a file."""

    completed: int = 0
    failed: int = 0
    errors_file: str | None = None

    @property
    def where(self) -> str:
        """Where failed requests are, for a sentence to end with."""
        return f", see {self.errors_file}" if self.errors_file else ""

    def __str__(self) -> str:
        return f"{counted(self.completed, 'result')}, {self.failed} failed"


class _Shown:
    """How far a collection is, and what it waits for, on a meter."""

    collector: Collector

    def __init__(self, meter: Meter, collected: Collected, workers: QueueWorkers) -> None:
        self._meter, self._collected, self._workers = meter, collected, workers
        self._pause = SubmitPause()

    def show(self, waiting: str = "") -> None:
        """Show it now."""
        count = self._collected.completed + self._collected.failed
        self._meter.update(count, f"{count} results, {self._collected.failed} failed{waiting}")

    def report(self) -> None:
        """Show it if it is time."""
        if self._meter.due():
            self.show()

    def wait(self, seconds: float) -> None:
        """Say what missing results wait for, and wait."""
        now = self.collector.batch
        quiet_s = self._pause.look(now)
        if self._meter.due():
            waits = self._workers.text() if now.sealed else unsealed(now, quiet_s)
            self.show(f"; waiting, {waits}")
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
    forced: bool = False,
) -> Collected:
    """Write a batch's results to files or stdout, as `write` does; return how many there were.

    `order`: input or completion. `follow` waits for missing results, `partial` does without them.
    `forced` says that what is there is replaced, whatever it is.

    Raises:
        BatchChanged: where there is not one line for each request; no file appears then.
        OutputUnwritable: if a file cannot be written, or what is there would be lost.
    """
    collected = Collected()

    def settle(marks: list[str]) -> None:
        if marks and not forced:  # somebody may have changed it while results were waited for
            now = store.batch(batch.id) or batch
            check_replaced(output, errors, batch.id, now.written)
        _note_written(store, batch, marks)

    with Meter(batch.id, batch.number("total")) as meter:
        shown = _Shown(meter, collected, QueueWorkers(store, batch.fields.get("queue", "")))
        collector = Collector(store, batch, follow=follow, partial=partial, sleep=shown.wait)
        shown.collector = collector
        write(collector.lines(order), output, errors, collected, shown.report, settle)
        collector.mark_collected()
        shown.show()
    of = f", of {counted(collector.batch.number('total'), 'request')}" if partial else ""
    tell(f"{batch.id}: {collected}{of}{collected.where}")
    return collected


def _note_written(store: BatchStore, batch: Batch, marks: list[str]) -> None:
    if marks:  # none where all goes to stdout
        with suppress(StoreUnavailable):  # a full Redis, or a user who may not write
            store.written(batch, marks)


def write(
    lines: Iterator[ResultLine],
    output: str | None,
    errors: str | None,
    collected: Collected,
    report: Callable[[], None],
    settle: Callable[[list[str]], None],
) -> None:
    """Write result lines to their files, which appear when all lines are written.

    An `output` of None or `-` is stdout. Without `errors`, failed requests go to stdout where the
    results do, else into a file beside `output`, made if there are any. After each line
    `collected` is counted up, and `report` called; `settle` is, with the marks of the files, before
    they appear.

    Raises:
        OutputUnwritable: no file has appeared then, and none has changed.
    """
    with ExitStack() as files:
        good = files.enter_context(ResultFile(output)) if output and output != "-" else None
        bad = files.enter_context(ResultFile(errors)) if errors else None
        beside = beside_of(output) if output and good and not bad else None
        if beside is not None and exists(beside):
            bad = files.enter_context(ResultFile(beside))  # an earlier collection's: replace it
        add_good = good.add if good else _write_to_stdout
        for line in lines:
            if line.failed:
                if bad is None and beside is not None:
                    bad = files.enter_context(ResultFile(beside))
                (bad.add if bad else add_good)(line)
                collected.failed += 1
            else:
                add_good(line)
                collected.completed += 1
            report()
        # All of them before the first one appears
        settle([file.sync() for file in (good, bad) if file is not None])
        if collected.failed and bad is not None:
            collected.errors_file = errors or beside


def _write_to_stdout(line: ResultLine) -> None:
    if sys.stdout is None:
        raise OutputUnwritable("standard output is closed, and the results go there")
    try:
        sys.stdout.buffer.write(line.json + b"\n")
        sys.stdout.buffer.flush()  # who follows a batch wants each line as it comes
    except BrokenPipeError:
        raise  # who read it has seen enough: that ends the command without a word
    except OSError as error:
        raise write_failed("standard output", error) from None


def check_outputs(
    output: str | None,
    errors: str | None,
    file: str | None = None,
    journal: Path | None = None,
    *,
    forced: bool = False,
) -> None:
    """Raise OutputUnwritable where a file cannot be written, or where two of these are one file.

    `output` and `errors` are as in collect.write; `file` is the input, where `-` is stdin. Files
    are one also through links and streams. Terminals and other character devices may have many
    names: nothing in them can be lost. `forced` says that what is there is replaced, whatever it
    is.
    """
    output = output or "-"
    if not (Path(output).name or is_url(output)):
        check_writable(Path(output))  # `.` and `/` have no name that the error file's could have
    beside = None if output == "-" else beside_of(output)
    known: dict[object, str] = {}
    for purpose, name, standard in (
        ("the input", file, 0), ("the output", output, 1),
        ("the error file", errors or beside, 1), ("the journal", journal, 1),
    ):  # fmt: skip
        place = _place(name, standard) if name is not None else None
        if place in known:
            raise OutputUnwritable(
                f"{known[place]} and {purpose} are the same file, {redacted(str(name))}; "
                "name another"
            )
        if place is not None:
            known[place] = purpose
        if name not in (None, "-", file):
            check_output(str(name)) if purpose != "the journal" else check_writable(Path(name))
    if forced and beside is not None and not errors:
        exists(
            beside
        )  # asked again when results come: a bucket that does not tell is found out now


def check_replaced(
    output: str | None, errors: str | None, batch_id: str, written: Collection[str] = ()
) -> None:
    """Raise OutputUnwritable where something would be lost: a file or object with content that is
    not what was `written` of the batch's results, by its marks.

    `output` and `errors` are as in collect.write.
    """
    beside = beside_of(output) if output and output != "-" else None
    for name in (output, errors or beside):
        if name and name != "-" and _is_kept(name) and not may_go(name, written):
            what = f", and as it is now it is not an earlier collection of batch {batch_id}"
            raise OutputUnwritable(
                f"{name} exists{what * bool(batch_id)}; name another file, or replace it with "
                f"--force{', which loses what was added or changed since' * bool(written)}"
            )


def _is_kept(name: str) -> bool:
    """Whether there is a file or an object whose content would be lost."""
    return exists(name) if is_url(name) else Path(name).is_file()


def _place(name: str | Path, standard: int) -> object:
    """Return what is equal for two names of one file; None for what many may share."""
    if is_url(str(name)):
        return str(name)
    try:
        state = os.fstat(standard) if name == "-" else Path(name).stat()
    except OSError:
        return os.path.realpath(name)  # not there yet
    if stat.S_ISCHR(state.st_mode) or (name == "-" and not stat.S_ISREG(state.st_mode)):
        return None
    return state.st_dev, state.st_ino
