"""Reads the rows of parquet, Arrow and CSV files as lines."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from producer.input.bucket import is_web
from producer.input.iterable import bad_row, explain_by_row
from producer.input.options import BadOption
from producer.input.reader import Input, InputUnreadable, LineStream, Place, RawChunk, chunks
from producer.input.tables.arrow import ArrowTable
from producer.input.tables.mapping import Row, RowMapping

#: Most characters of a CSV cell, the default limit of a line's bytes. Python's own limit is 128 KB.
_CELL = 10 * 2**20


class CsvTable:
    """A CSV file, which may be compressed; its cells are texts, `delimiter` is `,` or a tab."""

    rows: int | None = None

    def __init__(self, place: Place, delimiter: str) -> None:
        self._place, self._delimiter = place, delimiter
        self._opened: list[Any] = []
        csv.field_size_limit(max(csv.field_size_limit(), _CELL))
        try:
            self.columns: Sequence[str] = next(self._lines(), [])
        finally:
            self.close()
        if problem := _header_problem(self.columns):
            raise InputUnreadable(f"{place.name} has {problem}")

    def _lines(self) -> Iterator[list[str]]:
        source = Input(self._place)
        self._opened.append(source)
        text = io.TextIOWrapper(source.lines(), "utf-8-sig", errors="surrogateescape", newline="")
        self._opened.append(text)
        lines, number = csv.reader(text, delimiter=self._delimiter, strict=True), -1
        try:
            for cells in filter(None, lines):  # a blank line is not a row
                number += 1
                yield cells
        except csv.Error as error:
            raise InputUnreadable(
                f"{self._place.name}: after row {max(0, number)}, line {lines.line_num}: {error}; "
                'write a quote inside a quoted cell twice, ""'
            ) from None
        except (OSError, EOFError) as error:
            raise InputUnreadable(f"{self._place.name}: after row {number}: {error}") from None

    def read(self, wanted: Sequence[str]) -> Iterator[Row | bytes]:
        """Yield each row as a dict of all columns, a bad row as the line with its error."""
        columns, width = self.columns, len(self.columns)
        lines = self._lines()
        next(lines, None)
        for cells in lines:
            if len(cells) == width:
                yield {column: cell or None for column, cell in zip(columns, cells, strict=True)}
            else:
                yield bad_row(
                    f"has {len(cells)} cells, and the header names {width} columns; quote cells "
                    "that hold the delimiter"
                )

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


def _header_problem(columns: Sequence[str]) -> str:
    """Return the first problem of a CSV header with its remedy; '' for a valid header."""
    if not any(columns):
        return "no header; its first row must name the columns"
    if any("\0" in column for column in columns):
        return (
            "NUL characters in its header, as UTF-16 has; convert the file to UTF-8, for example "
            "with iconv -f UTF-16LE -t UTF-8"
        )
    if any("\ud800" <= letter <= "\udfff" for column in columns for letter in column):
        return (
            "a header that is not UTF-8; convert the file to UTF-8, for example with "
            "iconv -f CP949 -t UTF-8"
        )
    twice = [column for column in columns if columns.count(column) > 1]
    return f"two columns of the name {twice[0]!r}; rename one" if twice else ""


#: File endings, and the function that opens such a file.
_KINDS: dict[str, Callable[[Place], ArrowTable | CsvTable]] = {
    **dict.fromkeys((".parquet", ".pq"), partial(ArrowTable, parquet=True)),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), partial(ArrowTable, parquet=False)),
    ".csv": partial(CsvTable, delimiter=","),
    ".tsv": partial(CsvTable, delimiter="\t"),
}
_COMPRESSED = (".gz", ".zst")


def kind_of(name: str) -> str:
    """Return the ending that names a table's kind; '' for other files."""
    plain = (name.partition("?")[0] if is_web(name) else name).casefold()
    for ending in _COMPRESSED:
        if plain.removesuffix(ending).endswith((".csv", ".tsv")):
            plain = plain.removesuffix(ending)
    return next((kind for kind in _KINDS if plain.endswith(kind)), "")


class TableSource:
    """A source over the rows of one or several tables. Opens the first to read its columns.

    Raises BadOption for a bad mapping, InputUnreadable and ExtraMissing.
    """

    def __init__(self, name: str, places: Sequence[Place], pairs: Mapping[str, str]) -> None:
        self.name = name
        self._places, self._pairs = places, pairs
        first = self._open(places[0])
        try:
            self._mapping = RowMapping(pairs, first.columns)
            #: Fields that come from columns.
            self.fields = self._mapping.columns.keys()
            #: Number of rows; None if unknown.
            self.size = first.rows if len(places) == 1 else None
        finally:
            first.close()
        #: Rows read so far.
        self.position = 0
        self.repeatable = True

    @staticmethod
    def _open(place: Place) -> ArrowTable | CsvTable:
        return _KINDS[kind_of(place.name)](place)

    def reopen(self) -> TableSource:
        """Return the source from its first row."""
        return TableSource(self.name, [place.reopen() for place in self._places], self._pairs)

    def fingerprint(self) -> str:
        """Return a digest of the mapping and the files' fingerprints."""
        parts = [dict(self._pairs), *(place.fingerprint() for place in self._places)]
        return hashlib.sha256(orjson.dumps(parts)).hexdigest()

    def chunks(self, seed: str | None, max_line_bytes: int) -> Iterator[RawChunk]:
        """Yield the chunks of `reader.chunks`; raise BadOption if a file lacks a column."""
        explain = explain_by_row("row", self._mapping.columns)
        return chunks(LineStream(self._lines()), seed, max_line_bytes, explain)

    def _lines(self) -> Iterator[bytes]:
        wanted, line = self._mapping.wanted, self._mapping.line
        for place in self._places:
            table = self._open(place)
            try:
                for column in wanted:
                    count = table.columns.count(column)
                    if count == 0:
                        raise BadOption(
                            f"{place.name} has no column {column!r}, and {self._places[0].name} has"
                        )
                    if count > 1:
                        raise BadOption(f"{place.name} has two columns {column!r}; rename one")
                for row in table.read(wanted):
                    self.position += 1
                    yield row if isinstance(row, bytes) else line(row)
            finally:
                table.close()

    def close(self) -> None:
        """Do nothing: each file is closed when it has been read."""
