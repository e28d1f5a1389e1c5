"""Writes results as CSV, with a row for each request."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any, Self

import orjson

from contract.results import ResultLine
from producer.collect.columns import OutputColumns


class CsvLines:
    """Writes results as CSV in UTF-8; a cell without a value is empty. `write` takes the bytes."""

    def __init__(
        self, write: Callable[[bytes], None], columns: OutputColumns, delimiter: str
    ) -> None:
        self._write, self._columns = write, columns
        self._text = io.StringIO()
        # A terminator with a carriage return makes the writer quote cells that have one.
        self._rows = csv.writer(self, delimiter=delimiter, lineterminator="\r\n")
        self._rows.writerow(columns.names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()

    def add(self, line: ResultLine) -> None:
        """Append a result."""
        row = self._columns.row(line)
        self._rows.writerow([_cell(row[name]) for name in self._columns.names])
        if self._text.tell() >= 65_536:
            self.finish()

    def write(self, row: str) -> None:
        """Append a row that the CSV writer has formatted; it ends with a line feed."""
        self._text.write(row.removesuffix("\r\n") + "\n")

    def finish(self) -> None:
        """Write the remaining rows."""
        self._write(self._text.getvalue().encode())
        self._text.seek(0)
        self._text.truncate()


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value).decode()
