"""Result files: JSON lines or parquet, as files or as objects in buckets."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from contract.results import ResultLine
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
#: Bytes of lines that are written with one call.
_WRITE_BYTES = 65_536


def is_parquet(name: str) -> bool:
    """Whether results of this name are parquet; OutputUnwritable for another table."""
    kind = kind_of(name)
    if kind and kind not in _PARQUET:
        raise OutputUnwritable(
            f"cannot write {redacted(name)}: results are JSON lines or parquet; name a .jsonl or "
            ".parquet"
        )
    return bool(kind)


def check_output(name: str) -> None:
    """Raise OutputUnwritable unless results could be written there; create nothing."""
    if is_parquet(name):
        ParquetLines.check(name)
    if is_url(name):
        check_object(name)
    else:
        check_writable(Path(name))


def error_file_of(output: str) -> str:
    """Return the default error file of an output, next to it."""
    folder, slash, name = output.rpartition("/")
    path = Path(name)
    return f"{folder}{slash}{path.stem}.errors{path.suffix or '.jsonl'}"


def exists(name: str) -> bool:
    """Whether there is a file or object of this name.

    Raises:
        OutputUnwritable: the bucket does not answer that, as to a role that may not read. To
            assume a no could overwrite the object, or repeat a complete run.
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
            return False  # without reading it
        with place.open(in_order=True) as file:
            return _mark(size, hashlib.file_digest(file, "sha256")) in marks
    except InputUnreadable:
        return False


def _mark(size: int, digest: Any) -> str:
    """Return size and digest of written content, which identify it later."""
    return f"{size}-{digest.hexdigest()[:32]}"


class ResultFile:
    """A file of results, JSON lines or a table, which appears when it is complete.

    `expected` is an object's size in bytes, 0 if unknown. With an `owner`, a run's name, leaving
    raises BatchConflict instead of replacing anything.
    """

    def __init__(self, name: str, expected: int = 0, *, owner: str = "") -> None:
        self._name, self._expected, self._owner = name, expected, owner
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
            self._table = None
            if is_parquet(self._name):
                self._table = stack.enter_context(ParquetLines(self._write))
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
        # Many lines with one call: writing each alone takes a tenth of a collection's CPU.
        if self._lines:
            self._lines.append(b"")
            self._write(b"\n".join(self._lines))
            self._lines, self._lines_size = [], 0

    def _write(self, data: bytes) -> None:
        self._size += len(data)
        self._digest.update(data)
        self._target.write(data)

    def sync(self) -> str:
        """Write the rest to disk, so that a full disk fails here; return the content's mark."""
        if self._table is not None:
            self._table.finish()
        self._write_lines()
        self._target.sync()
        return _mark(self._size, self._digest)
