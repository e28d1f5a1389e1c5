"""Collects a batch's results: in input or completion order, to files or stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from contract.ahead import ResultsAhead
from contract.batch import Batch
from contract.errors import BatchConflict
from contract.index import IndexEntry
from contract.results import ResultLine, own_line, result_line
from contract.store import BatchStore
from producer.files import AtomicFile
from producer.seen import SeenIds

#: Results fetched at once: the fewest to begin with, more where they turn out to be small.
FETCH, MOST = 50, 250
FETCH_BYTES = 2 * 2**20
#: Between two looks for new results while following, in seconds.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.02, 0.5

#: Request ids and their entries of the batch's index.
_Window = tuple[list[str], list[IndexEntry]]


class Collector:
    """Reads one batch's results. With `follow` it waits for those that are not there yet.

    A finished batch gives one line for each of its requests, whatever became of
    them; an unfinished one without `follow` gives what there is.
    """

    def __init__(
        self,
        store: BatchStore,
        batch_id: str,
        *,
        follow: bool,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._id = batch_id
        self._follow = follow
        self._sleep = sleep
        self._wait_s = _SHORTEST_WAIT_S
        self._fetch = FETCH

    def lines(self, order: str) -> Iterator[ResultLine]:
        """Yield the result lines; `order` is input or completion."""
        return self._in_input_order() if order == "input" else self._as_completed()

    def _state(self) -> Batch:
        batch = self._store.batch(self._id)
        if batch is None:
            raise BatchConflict(f"batch {self._id} was deleted, or its results expired, meanwhile")
        return batch

    def _results(self, request_ids: list[str]) -> list[bytes | None]:
        return self._sized(self._store.results(request_ids))

    def _sized(self, raws: list[bytes | None]) -> list[bytes | None]:
        size = sum(len(raw) for raw in raws if raw is not None) + 1
        self._fetch = max(1, min(MOST, FETCH_BYTES * len(raws) // size))
        return raws

    def _pause(self) -> None:
        self._sleep(self._wait_s)
        self._wait_s = min(self._wait_s * 2, _LONGEST_WAIT_S)

    def _in_input_order(self) -> Iterator[ResultLine]:
        for window, raws in self._fetched(self._windows()):
            yield from self._given(window, raws)

    def _as_completed(self) -> Iterator[ResultLine]:
        with closing(SeenIds()) as seen:
            for (request_ids, _), raws in self._fetched(self._finished_windows()):
                for request_id, raw in zip(request_ids, raws, strict=True):
                    # None: being retried, it will come again; or lost, see below.
                    line = own_line(request_id, raw) if raw is not None else None
                    if line is not None and seen.add(request_id):
                        yield line
            if self._state().finished:
                yield from self._left_out(seen)

    def _fetched(
        self, windows: Iterator[_Window | None]
    ) -> Iterator[tuple[_Window, list[bytes | None]]]:
        """Yield windows with their results; Redis looks up the next ones meanwhile."""
        with closing(ResultsAhead(self._store)) as ahead:
            asked: _Window | None = None
            for window in windows:
                raws = self._sized(ahead.answer()) if asked else []
                if window:
                    ahead.ask(window[0])
                if asked:
                    yield asked, raws
                asked = window

    def _windows(self) -> Iterator[_Window | None]:
        """Yield what is fetched together, and None before a wait for more, and at the end."""
        read = 0
        while True:
            batch = self._state()  # before the index, so that a sealed batch's index is whole
            for chunk in self._store.index(self._id, read):
                read += 1
                ids, start = chunk.request_ids(self._id), 0
                while start < len(ids):
                    end = start + self._fetch
                    yield ids[start:end], chunk.entries[start:end]
                    start = end
            yield None
            if batch.sealed or not self._follow:
                return
            self._pause()

    def _finished_windows(self) -> Iterator[_Window | None]:
        """Yield the same of the requests that have ended, in that order and without entries."""
        at, finished = 0, False
        while True:
            if ids := self._store.finished_ids(self._id, at, self._fetch):
                at, finished = at + len(ids), False
                self._wait_s = _SHORTEST_WAIT_S
                yield ids, []
                continue
            yield None
            if finished or not self._follow:
                return
            finished = self._state().finished  # if so, what came before is still to be read
            if not finished:
                self._pause()

    def _given(self, window: _Window, raws: list[bytes | None]) -> Iterator[ResultLine]:
        if None in raws:
            yield from self._with_gaps(*window)
            return
        self._wait_s = _SHORTEST_WAIT_S
        for request_id, (line, custom_id, _), raw in zip(*window, raws, strict=True):
            yield result_line(request_id, custom_id, line, raw)

    def _with_gaps(self, request_ids: list[str], entries: list[IndexEntry]) -> Iterator[ResultLine]:
        """Yield a window's lines where results are missing: not there yet, or lost."""
        start = 0
        while start < len(request_ids):
            finished = self._state().finished  # before the results: none comes after it
            for raw in self._results(request_ids[start : start + self._fetch]):
                if raw is None and not finished and self._follow:
                    self._pause()
                    break
                if raw is not None or finished:
                    self._wait_s = _SHORTEST_WAIT_S
                    line, custom_id, _ = entries[start]
                    yield result_line(request_ids[start], custom_id, line, raw)
                start += 1

    def _left_out(self, seen: SeenIds) -> Iterator[ResultLine]:
        """Yield a line for each request that the list of finished ones did not give."""
        for chunk in self._store.index(self._id):
            for entry, request_id in zip(chunk.entries, chunk.request_ids(self._id), strict=True):
                if seen.add(request_id):
                    raw = self._store.results([request_id])[0]
                    yield result_line(request_id, entry[1], entry[0], raw)


@dataclass(slots=True)
class Collected:
    """How many lines went where. `errors_file` is where failed requests are, if in a file."""

    completed: int = 0
    failed: int = 0
    errors_file: Path | None = None


def errors_beside(output: str) -> Path:
    """Return the error file of an output file that comes without one."""
    path = Path(output)
    return path.with_name(f"{path.stem}.errors{path.suffix or '.jsonl'}")


def write(
    lines: Iterator[ResultLine],
    output: str | None,
    errors: str | None,
    report: Callable[[Collected], None] = lambda collected: None,
) -> Collected:
    """Write result lines to their files, which appear when all lines are written.

    Args:
        lines: what to write.
        output: file for results; None or `-` is stdout.
        errors: file for failed requests. Without it they go to stdout where the
            results do, else into a file beside `output`, made if there are any.
        report: called after each line.
    """
    collected = Collected()
    to_stdout = output is None or output == "-"
    with ExitStack() as files:
        good = None if output is None or output == "-" else files.enter_context(AtomicFile(output))
        bad = files.enter_context(AtomicFile(errors)) if errors else None
        beside = None if to_stdout or errors else errors_beside(output or "")
        if beside is not None and beside.exists():
            bad = files.enter_context(
                AtomicFile(beside)
            )  # it is an earlier collection's: replace it
        for line in lines:
            if line.failed and bad is None and beside is not None:
                bad = files.enter_context(AtomicFile(beside))
            target = (bad or good) if line.failed else good
            _put(target, line.json + b"\n")
            collected.completed += not line.failed
            collected.failed += line.failed
            report(collected)
        if collected.failed and bad is not None:
            collected.errors_file = bad.path
    return collected


def _put(file: AtomicFile | None, data: bytes) -> None:
    if file is not None:
        file.write(data)
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()  # who follows a batch wants each line as it comes
