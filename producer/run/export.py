"""Writes a run's results to a bucket or a table, which cannot be appended to.

The run appends its lines to local files, with a journal. When the run is complete, the lines are
written to their final places and the local files removed. The journal stays, so that the same
command knows that the run is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from heapq import merge
from pathlib import Path

from contract.errors import BatchConflict
from contract.results import ResultLine, line_number
from producer.collect.columns import OutputColumns
from producer.collect.outputs import ResultFile, exists, table_ending
from producer.input.bucket import is_url, place_of
from producer.input.files import unwritable
from producer.input.source import Source
from producer.run.again import UNANSWERED, failed_lines
from producer.run.journal import Journal, RunProgress


def needs_export(output: str, errors: str | None) -> bool:
    """Return whether a run cannot append to one of these files."""
    return any(is_url(name) or bool(table_ending(name)) for name in (output, errors) if name)


@dataclass(frozen=True, slots=True)
class Export:
    """The local line files of one run, to be written to `output` and `errors`.

    Without `errors`, the output is a table of all rows.
    """

    output: str
    errors: str | None

    @property
    def line_files(self) -> tuple[Path, Path]:
        """The local files of lines: next to the output; for a bucket, in the working folder."""
        path = Path(self.output)
        if is_url(self.output):
            digest = hashlib.sha256(self.output.encode()).hexdigest()[:8]
            path = Path(f"{self.output.rpartition('/')[2]}.{digest}")
        return path.with_name(f"{path.name}.lines"), path.with_name(f"{path.name}.errors.lines")

    @property
    def journal(self) -> Journal:
        """The run's journal."""
        return Journal(self.line_files[0])

    def already_written(self, source: Source, seed: str, retry: str = "") -> RunProgress | None:
        """Return the progress of an earlier, complete run of this input; None without one.

        With `retry`, None also if lines can run again. Raises BatchConflict if the output is of
        another run, or of no run.
        """
        done = self.journal.read()
        if done is None:
            for name in filter(None, (self.output, self.errors)):
                if exists(name):
                    raise BatchConflict(f"{name} exists; remove it, or name another")
            return None
        if not done.delivered:
            return None  # the export was interrupted
        if not exists(self.output):  # the output was removed, so this is a new run
            self._remove_line_files()
            if self.errors and exists(self.errors):
                raise BatchConflict(f"{self.errors} exists; remove it, or name another error file")
            return None
        fingerprint = source.fingerprint()  # '' for a pipe, whose content is unknown
        if not fingerprint or done.fingerprint != fingerprint or done.delivered != seed:
            raise BatchConflict(
                f"{self.output} is of a run of another input or with other options: give the same "
                f"ones, name another output, or remove {self.output} and {self.journal.path} to "
                "start again"
            )
        if done.place and place_of(self.output).fingerprint() != done.place:
            raise BatchConflict(
                f"{self.output} is not what this run has written: it was changed since; name "
                f"another output, or remove both it and {self.journal.path} to start again"
            )
        self._remove_unneeded(done)  # the earlier run may have been stopped before it did this
        if retry and all(path.exists() for path in self.line_files):
            return None
        return done

    def write(self, seed: str, columns: OutputColumns | None = None) -> None:
        """Write the lines of a complete run to their final places.

        `columns` are those of a table, `seed` is the digest of the run's options. Raises
        BatchConflict if another run has written to these places.
        """
        done, (good, bad) = self.journal.read(), self.line_files
        if done is None:
            raise BatchConflict(f"{self.journal.path} was removed while the run wrote it")
        with ExitStack() as files:
            size, lines = done.output, _lines(good, failed=False)
            if done.errors and table_ending(self.output):
                size += done.errors
                lines = merge(
                    lines, _lines(bad, failed=True), key=lambda one: line_number(one.json)
                )
            # After a retry, the output of the run before it is replaced.
            known = bool(done.place) and exists(self.output)
            replaces = known and place_of(self.output).fingerprint() == done.place
            owner = "" if replaces else done.name
            output = files.enter_context(
                ResultFile(self.output, size, columns=columns, owner=owner)
            )
            for line in lines:
                output.add(line)
            if self.errors and (done.errors or (replaces and exists(self.errors))):
                errors = files.enter_context(
                    ResultFile(self.errors, done.errors, columns=columns, owner=owner)
                )
                for line in _lines(bad, failed=True) if done.errors else ():
                    errors.add(line)
                errors.sync()
            output.sync()  # both files are on disk before either gets its final name
        place = output.fingerprint or place_of(self.output).fingerprint()
        done = replace(done, delivered=seed, place=place)
        self.journal.write(done)
        self._remove_unneeded(done)

    def _remove_unneeded(self, done: RunProgress) -> None:
        """Remove the line files, unless lines can run again, which needs these files."""
        bad = self.line_files[1]
        if not (bad.exists() and failed_lines(bad, done.errors, UNANSWERED)):
            self._remove_line_files()

    def _remove_line_files(self) -> None:
        for path in self.line_files:
            path.unlink(missing_ok=True)


def _lines(path: Path, *, failed: bool) -> Iterator[ResultLine]:
    try:
        with path.open("rb") as file:
            for line in file:
                yield ResultLine(line.rstrip(b"\n"), failed)
    except OSError as error:
        raise unwritable(path, error) from None
