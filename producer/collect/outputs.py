"""Where results go: files and objects in buckets, of JSON lines or as parquet."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Self

from contract.results import ResultLine
from producer.collect.parquet import ParquetLines
from producer.input.bucket import ObjectMissing, ObjectPlace, is_url, place_of, redacted
from producer.input.files import (
    BUFFER_BYTES,
    AtomicFile,
    ObjectFile,
    OutputUnwritable,
    check_object,
    check_writable,
)
from producer.input.reader import InputUnreadable
from producer.input.tables.source import kind_of

_PARQUET = (".parquet", ".pq")
#: Lines wait until so many bytes are written at once.
_WRITE_BYTES = 65_536


def is_parquet(name: str) -> bool:
    """Whether results of that name are a table.

    Raises:
        OutputUnwritable: it is the name of a table that results cannot be written as.
    """
    kind = kind_of(name)
    if kind and kind not in _PARQUET:
        raise OutputUnwritable(
            f"cannot write {redacted(name)}: results are JSON lines or parquet; name a .jsonl or "
            ".parquet"
        )
    return bool(kind)


def check_output(name: str) -> None:
    """Raise OutputUnwritable unless results could be written there; creates nothing."""
    if is_parquet(name):
        ParquetLines.check(name)
    if is_url(name):
        check_object(name)
    else:
        check_writable(Path(name))


def beside(output: str) -> str:
    """Return the error file of an output that comes without one."""
    folder, slash, name = output.rpartition("/")
    path = Path(name)
    return f"{folder}{slash}{path.stem}.errors{path.suffix or '.jsonl'}"


def exists(name: str) -> bool:
    """Whether there is a file or an object of that name.

    Raises:
        OutputUnwritable: its bucket does not tell, as to a role that may not read. Taken for no, it
            would be overwritten, or a run that is complete done again.
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


def may_go(name: str, marks: Collection[str]) -> bool:
    """Whether what is there is nothing, or has one of these marks: that it was written here, and
    has not changed since."""
    place = place_of(name)
    try:
        size = place.size()
        if size == 0:
            return True
        if not any(mark.startswith(f"{size}-") for mark in marks):
            return False  # without reading it
        with place.open(in_order=True) as file:
            return Content.of(file).mark in marks
    except InputUnreadable:
        return False  # what cannot be read may be anything


class Content:
    """Bytes that are counted and digested as they come."""

    def __init__(self) -> None:
        self._size, self._digest = 0, hashlib.sha256()

    @classmethod
    def of(cls, file: BinaryIO) -> Self:
        """Return that of a file, which is read to its end."""
        content = cls()
        while piece := file.read(BUFFER_BYTES):
            content.add(piece)
        return content

    def add(self, data: bytes) -> None:
        """Append."""
        self._size += len(data)
        self._digest.update(data)

    @property
    def mark(self) -> str:
        """Size and digest, by which it is known again."""
        return f"{self._size}-{self._digest.hexdigest()[:32]}"


class ResultFile:
    """The results in one place: JSON lines, or a table. They appear when they are complete.

    `expected` is for an object: how many bytes the lines have, where that is known. What has an
    `owner`, the name of a run, replaces nothing else.

    Entering raises OutputUnwritable, leaving BatchConflict where the owner's place is taken.
    """

    def __init__(self, name: str, expected: int = 0, *, owner: str = "") -> None:
        self._name, self._expected, self._owner = name, expected, owner
        self._stack, self._content = ExitStack(), Content()
        self._lines: list[bytes] = []
        self._waiting = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._target: ObjectFile | AtomicFile
            if is_url(self._name):
                self._target = ObjectFile(self._name, self._expected, owner=self._owner)
            else:
                self._target = AtomicFile(self._name, new=bool(self._owner))
            stack.enter_context(self._target)
            self._table = None
            if is_parquet(self._name):
                self._table = stack.enter_context(ParquetLines(self._write))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    @property
    def fingerprint(self) -> str:
        """Of an object with an owner that is complete, what its place's fingerprint says."""
        return self._target.fingerprint if isinstance(self._target, ObjectFile) else ""

    def add(self, line: ResultLine) -> None:
        """Append a result."""
        if self._table is not None:
            self._table.add(line)
            return
        self._lines.append(line.json)
        self._waiting += len(line.json)
        if self._waiting >= _WRITE_BYTES:
            self._write_lines()

    def _write_lines(self) -> None:
        """Write the lines that wait, at once: to count and digest each costs a tenth of it all."""
        if self._lines:
            self._lines.append(b"")
            self._write(b"\n".join(self._lines))
            self._lines, self._waiting = [], 0

    def _write(self, data: bytes) -> None:
        self._content.add(data)
        self._target.write(data)

    def sync(self) -> str:
        """Write what is left, so that what can fail for want of room fails here; return the mark of
        what will appear."""
        if self._table is not None:
            self._table.finish()
        self._write_lines()
        self._target.sync()
        return self._content.mark
