"""Collects a batch's results into files or standard output, and shows how far it is."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from contract.batch import Batch
from contract.errors import StoreUnavailable
from contract.redis.batches import BatchStore
from contract.results import ResultLine
from producer.cli.outputs import check_replaced
from producer.cli.progress import Meter, SubmitPause, counted, tell, unsealed
from producer.collect.collect import Collector
from producer.collect.outputs import ResultFile, exists
from producer.collect.outputs import beside as beside_of
from producer.input.files import OutputUnwritable, write_failed
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
        collector.kept()
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
