"""Reads parquet and Arrow files a few hundred rows at a time, whatever their size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from producer.input.reader import CHUNK_LINES, FilePlace, InputUnreadable, Place
from producer.input.tables.arrow import pyarrow
from producer.input.tables.arrow_rows import rows_of
from producer.input.tables.table import Row

#: Bytes that are read of a column at a time: without it, a row group's columns come whole.
_BUFFER = 2**20
_ARROW_FILE = b"ARROW1"


class ParquetTable:
    """One parquet file."""

    def __init__(self, place: Place) -> None:
        self.name = place.name
        parquet = pyarrow(place.name, "parquet")
        self._errors = _errors()
        self._file = _opened(place, "OSFile")
        try:
            self._parquet = parquet.ParquetFile(
                self._file,
                buffer_size=_BUFFER,
                pre_buffer=False,
                coerce_int96_timestamp_unit="us",  # of nanoseconds, 64 bits end in 2262
            )
        except self._errors as error:
            self._file.close()
            raise _damaged(self.name, error) from None
        self.columns: Sequence[str] = self._parquet.schema_arrow.names
        self.rows: int | None = self._parquet.metadata.num_rows

    def read(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the rows; the unwanted columns' bytes are not read."""
        row = 0
        try:
            for batch in self._parquet.iter_batches(CHUNK_LINES, columns=wanted, use_threads=False):
                for found in rows_of(batch):
                    row += 1
                    yield found
        except self._errors as error:
            raise _damaged(self.name, error, row) from None

    def close(self) -> None:
        """Close the file."""
        self._parquet.close()
        self._file.close()


class ArrowTable:
    """One Arrow file, of either form: `.arrow` of a dataset's folder is a stream.

    A batch of its rows is in memory at a time, as large as the file's writer has made it; of a file
    here it is mapped.
    """

    rows: int | None = None

    def __init__(self, place: Place) -> None:
        self.name = place.name
        self._arrow, self._ipc = pyarrow(place.name), pyarrow(place.name, "ipc")
        self._errors = _errors()
        self._file = _opened(place, "memory_map")
        try:
            head = self._file.read(len(_ARROW_FILE))
            self._file.seek(0)
            self._is_file = head == _ARROW_FILE
            open_it = self._ipc.open_file if self._is_file else self._ipc.open_stream
            self._batches = open_it(self._file)
        except self._errors as error:
            self._file.close()
            raise _damaged(self.name, error) from None
        self.columns: Sequence[str] = self._batches.schema.names

    def _each(self) -> Iterator[Any]:
        if self._is_file:
            yield from map(self._batches.get_batch, range(self._batches.num_record_batches))
        else:
            yield from self._batches

    def read(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the rows."""
        row = 0
        try:
            for batch in self._each():
                kept = batch.select(list(wanted))
                for start in range(0, kept.num_rows, CHUNK_LINES):
                    for found in rows_of(kept.slice(start, CHUNK_LINES)):
                        row += 1
                        yield found
        except self._errors as error:
            raise _damaged(self.name, error, row) from None

    def close(self) -> None:
        """Close the file."""
        with suppress(*self._errors):
            self._file.close()


def _opened(place: Place, how: str) -> Any:
    """Return a place as pyarrow reads it; `how` names what opens a file of this machine."""
    arrow, stream = pyarrow(place.name), place.open(in_order=False)  # our words where it cannot be
    if not (isinstance(place, FilePlace) and place.size()):
        return arrow.PythonFile(stream, mode="r")
    stream.close()
    return getattr(arrow, how)(place.name)


def _errors() -> tuple[type[Exception], ...]:
    return (pyarrow("a table").ArrowException, OSError, ValueError)


def _damaged(name: str, error: Exception, row: int = 0) -> InputUnreadable:
    told = str(error).partition("\n")[0]
    where = f"after row {row}: " if row else ""
    return InputUnreadable(f"cannot read {name}: {where}{told}")
