"""Writes results as JSON lines, parquet or CSV, into files or objects in buckets.

A written file's mark is its size and digest. Redis keeps the marks, to recognise the file later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from contract.results import ResultLine
from producer.collect.columns import OutputColumns
from producer.collect.csv_lines import CsvLines
from producer.collect.parquet import ParquetLines
from producer.input.bucket import ObjectMissing, ObjectPlace, is_url, place_of, redacted
from producer.input.files import (
    AtomicFile,
    ObjectFile,
    OutputUnwritable,
    check_object,
    check_writable,
)
from producer.input.reader import InputUnreadable
from producer.input.tables.source import kind_of

_PARQUET = (".parquet", ".pq")
#: Endings of CSV files, and what separates their cells.
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
#: Endings of spreadsheets, which are not written.
_SHEETS = (".xls", ".xlsx", ".xlsm", ".xlsb", ".ods")
#: Bytes of lines that are written with one call.
_WRITE_BYTES = 65_536


def table_ending(name: str) -> str:
    """Return the ending of an output table, '' for JSON lines; refuse other tables."""
    kind, folded = kind_of(name), name.casefold()
    if folded.endswith(_SHEETS):
        raise OutputUnwritable(
            f"cannot write {redacted(name)}: spreadsheets are not written; give a name that "
            "ends with .csv, which spreadsheet programs open, or with .parquet"
        )
    if kind and not (kind in (*_PARQUET, *_DELIMITERS) and folded.endswith(kind)):
        raise OutputUnwritable(
            f"cannot write {redacted(name)}: results are JSON lines, parquet or CSV; name a "
            ".jsonl, .parquet, .csv or .tsv"
        )
    return kind


def check_output(name: str) -> None:
    """Raise OutputUnwritable if results could not be written to `name`; create nothing."""
    if table_ending(name) in _PARQUET:
        ParquetLines.check(name)
    if is_url(name):
        check_object(name)
    else:
        check_writable(Path(name))


def error_file_of(output: str) -> str | None:
    """Return the error file next to an output; None for a table, which has all rows."""
    if table_ending(output):
        return None
    folder, slash, name = output.rpartition("/")
    path = Path(name)
    return f"{folder}{slash}{path.stem}.errors{path.suffix or '.jsonl'}"


def exists(name: str) -> bool:
    """Whether there is a file or object of this name.

    Raises:
        OutputUnwritable: the bucket does not answer, for example to a role that may not read. If
            False were returned, the object could be overwritten or a complete run repeated.
    """
    if not is_url(name):
        return Path(name).exists()
    try:
        ObjectPlace(name).size()
    except ObjectMissing:
        return False
    except InputUnreadable as error:
        raise OutputUnwritable(
            f"{error.message}; so it is not known whether {name} exists, and it is left as it is: "
            "allow this role to read it (S3: s3:GetObject), or try again when its service answers"
        ) from None
    return True


def replaceable(name: str, marks: Collection[str]) -> bool:
    """Whether a file or object is empty, or unchanged since it was written with one of `marks`."""
    place = place_of(name)
    try:
        size = place.size()
        if size == 0:
            return True
        if not any(mark.startswith(f"{size}-") for mark in marks):
            return False  # the size differs from all marks, so the content need not be read
        with place.open(in_order=True) as file:
            return _mark(size, hashlib.file_digest(file, "sha256")) in marks
    except InputUnreadable:
        return False


def _mark(size: int, digest: Any) -> str:
    """Return the mark of written content: its size and digest."""
    return f"{size}-{digest.hexdigest()[:32]}"


class ResultFile:
    """A file of results, JSON lines or a table, which appears when it is complete.

    `expected` is an object's size in bytes, 0 if unknown. With an `owner` (the name of the run that
    writes it), leaving the context raises BatchConflict if another file has that name. `columns`
    are those of a table.
    """

    def __init__(
        self,
        name: str,
        expected: int = 0,
        *,
        columns: OutputColumns | None = None,
        owner: str = "",
    ) -> None:
        self._name, self._expected, self._owner = name, expected, owner
        self._columns = columns or OutputColumns()
        self._stack = ExitStack()
        self._size, self._digest = 0, hashlib.sha256()
        self._lines: list[bytes] = []
        self._lines_size = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._target: ObjectFile | AtomicFile
            if is_url(self._name):
                self._target = ObjectFile(self._name, self._expected, owner=self._owner)
            else:
                self._target = AtomicFile(self._name, new=bool(self._owner))
            stack.enter_context(self._target)
            self._table: ParquetLines | CsvLines | None = None
            if kind := table_ending(self._name):
                write, columns = self._write, self._columns
                if delimiter := _DELIMITERS.get(kind):
                    self._table = CsvLines(write, columns, delimiter)
                else:
                    self._table = ParquetLines(write, columns)
                stack.enter_context(self._table)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of a complete object with an owner; '' for a file."""
        return self._target.fingerprint if isinstance(self._target, ObjectFile) else ""

    def add(self, line: ResultLine) -> None:
        """Append a result."""
        if self._table is not None:
            self._table.add(line)
            return
        self._lines.append(line.json)
        self._lines_size += len(line.json)
        if self._lines_size >= _WRITE_BYTES:
            self._write_lines()

    def _write_lines(self) -> None:
        # One call for many lines: a call for each takes a tenth of a collection's CPU time.
        if self._lines:
            self._lines.append(b"")
            self._write(b"\n".join(self._lines))
            self._lines, self._lines_size = [], 0

    def _write(self, data: bytes) -> None:
        self._size += len(data)
        self._digest.update(data)
        self._target.write(data)

    def sync(self) -> str:
        """Write the rest to disk; return the file's mark. A full disk raises its error here."""
        if self._table is not None:
            self._table.finish()
        self._write_lines()
        self._target.sync()
        return _mark(self._size, self._digest)
