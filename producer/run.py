"""`producer run`: a file of any size through a Redis of any size, in windows of lines.

Each window is a batch of its own. Two are in Redis at a time: the worker is at the one
while the other waits, so it never runs dry; the older one is appended to the output in
the order of the input, and deleted. A journal beside the output says how far that is. It is
written after the output is on disk, so after a crash the same command cuts the output
back to the journal and goes on; what the worker has done meanwhile is not done again.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import BinaryIO

import orjson

from contract import keys
from contract.errors import BatchConflict, RequestRejected
from contract.schema import parse_line
from contract.settings import Settings
from contract.store import BatchStore
from producer.files import AtomicFile, OutputUnwritable
from producer.options import Submission
from producer.reader import CHUNK_LINES, Input, RawChunk, chunks
from producer.results import Collector
from producer.seen import SeenIds
from producer.submit import Part, Submitter

#: Windows in Redis at a time.
AHEAD = 2
_REMEDY = "use the same ones, or remove the output and its .progress to start anew"


@dataclass(frozen=True, slots=True)
class Done:
    """What the journal says: what is in the output, and where in the input that ends.

    `output` and `errors` are bytes; `line` is the last physical line; `windows` counts them.
    """

    name: str
    digest: str
    line: int = 0
    windows: int = 0
    output: int = 0
    errors: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Window:
    """A batch of some chunks, and where in the input it ends."""

    batch_id: str
    line: int
    digest: str

    def take(self, raws: Iterator[RawChunk]) -> Iterator[RawChunk]:
        """Pass its chunks on, numbered anew."""
        for ordinal, raw in enumerate(raws):
            self.line, self.digest, raw.ordinal = raw.cursor, raw.digest, ordinal
            yield raw


class Journal:
    """The state of a run, in a file beside its output; it goes when the run is complete."""

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(f"{output.name}.progress")

    def read(self) -> Done | None:
        """Return what an earlier run left, None if there was none."""
        if not self.path.exists():
            return None
        try:
            return Done(**orjson.loads(self.path.read_bytes()))
        except (orjson.JSONDecodeError, TypeError) as error:
            raise BatchConflict(
                f"{self.path} is no journal of `producer run` ({error}); remove it and the output "
                "to start anew"
            ) from None

    def write(self, done: Done) -> None:
        """Replace it, on disk before this returns."""
        with AtomicFile(self.path) as file:
            file.write(orjson.dumps(asdict(done)))


class Run:
    """One run of one file. `report` is called with what is done after each window."""

    def __init__(
        self,
        store: BatchStore,
        settings: Settings,
        submission: Submission,
        window: int,
        report: Callable[[Done], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._submission = submission
        self._chunks = max(1, window // CHUNK_LINES)
        self._report = report
        self._seen = SeenIds()

    def run(self, source: Input, output: Path, errors: Path) -> Done:
        """Take the file through, or the rest of it.

        Raises:
            BatchConflict: the output is there and is not this run's, or the input has changed.
            InputUnreadable, OutputUnwritable, StoreUnavailable: the same command goes on later.
        """
        journal = Journal(output)
        with closing(self._seen), ExitStack() as files:
            out = files.enter_context(_locked(output))
            done = self._begin(journal, out)
            bad = files.enter_context(_locked(errors))
            for file, size in ((out, done.output), (bad, done.errors)):
                file.truncate(size)
                file.seek(size)
            limit = self._settings.max_line_bytes
            raws = chunks(source.lines(), self._submission.seed, limit)
            self._skip(raws, done)
            windows = self._windows(raws, source.name, done)
            waiting: deque[_Window] = deque()
            while True:
                waiting.extend(islice(windows, AHEAD - len(waiting)))
                if not waiting:
                    break
                window = waiting.popleft()
                done = self._collect(window, done, out, bad)
                journal.write(done)
                self._store.delete(window.batch_id)
                self._report(done)
        journal.path.unlink()
        if not done.errors:
            errors.unlink()
        return done

    def _begin(self, journal: Journal, out: BinaryIO) -> Done:
        done = journal.read()
        if done is None:
            if out.seek(0, os.SEEK_END):
                raise BatchConflict(f"{out.name} exists; remove it, or name another output")
            done = Done(f"run_{secrets.token_hex(8)}", self._submission.seed)
            journal.write(done)
        elif done.windows:  # the run may have been stopped before it deleted this one
            self._store.delete(_batch_id(done.name, done.windows - 1))
        return done

    def _skip(self, raws: Iterator[RawChunk], done: Done) -> None:
        """Read the part of the input whose results are in the output."""
        line, digest = 0, self._submission.seed
        while line < done.line and (raw := next(raws, None)) is not None:
            line, digest = raw.cursor, raw.digest
            for _, text in raw.lines:
                custom_id = _custom_id(text)
                if custom_id is not None:
                    self._seen.add(keys.request_id(done.name, custom_id))
        if (line, digest) != (done.line, done.digest):
            raise BatchConflict(
                f"the input or the options differ from those of the run that was stopped after "
                f"line {done.line}; {_REMEDY}"
            )

    def _windows(self, raws: Iterator[RawChunk], name: str, done: Done) -> Iterator[_Window]:
        """Queue one window after another; each is queued when the next one is asked for."""
        digest = done.digest
        for number in count(done.windows):
            first = next(raws, None)
            if first is None:
                return
            window = _Window(_batch_id(done.name, number), first.cursor, first.digest)
            part = Part(digest, self._seen, done.name)
            submission = replace(self._submission, batch_id=window.batch_id)
            submitter = Submitter(self._store, self._settings, submission, part=part)
            try:
                submitter.create(name)
                submitter.run(window.take(chain([first], islice(raws, self._chunks - 1))))
            except BatchConflict as error:
                problem, _, _ = error.message.rpartition(";")
                raise BatchConflict(f"{problem or error.message}; {_REMEDY}") from None
            digest = window.digest
            yield window

    def _collect(self, window: _Window, done: Done, out: BinaryIO, bad: BinaryIO) -> Done:
        """Append a window's results to the files, on disk when this returns."""
        failed = completed = 0
        try:
            for line in Collector(self._store, window.batch_id, follow=True).lines("input"):
                (bad if line.failed else out).write(line.json + b"\n")
                failed += line.failed
                completed += not line.failed
            for file in (out, bad):
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputUnwritable(f"cannot write {out.name}: {error.strerror}") from None
        return replace(
            done, line=window.line, digest=window.digest, windows=done.windows + 1,
            output=out.tell(), errors=bad.tell(),
            completed=done.completed + completed, failed=done.failed + failed,
        )  # fmt: skip


def _batch_id(name: str, window: int) -> str:
    return f"{name}.{window}"


def _custom_id(line: bytes) -> str | None:
    try:
        return parse_line(line, {}).custom_id
    except RequestRejected as error:
        return error.custom_id


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file to append to it, keeping what is there; only one run may have it."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    except OSError as error:
        raise OutputUnwritable(f"cannot write {path}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchConflict(f"another `producer run` is writing {path}") from None
        yield file
