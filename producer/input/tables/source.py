"""A table as a source of lines: one for each row, numbered from 1."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from producer.input.bucket import is_web
from producer.input.iterable import LineStream, bad_row, explain_by_row
from producer.input.options import BadOption
from producer.input.reader import Input, InputUnreadable, Place, RawChunk, chunks
from producer.input.tables.arrow import ArrowTable
from producer.input.tables.mapping import Row, RowMapping

#: Longest cell of CSV, in characters: as long as a line may be by default. Python's own limit is
#: 128 KB.
_CELL = 10 * 2**20


class CsvTable:
    """One CSV file, also compressed, whose cells are texts. `delimiter` is `,` or a tab.

    Raises:
        InputUnreadable: it has no header, one that is not UTF-8, or two columns of one name.
    """

    rows: int | None = None

    def __init__(self, place: Place, delimiter: str) -> None:
        self._place, self._delimiter = place, delimiter
        self._opened: list[Any] = []
        csv.field_size_limit(max(csv.field_size_limit(), _CELL))
        try:
            self.columns: Sequence[str] = next(self._lines(), [])
        finally:
            self.close()
        name = place.name
        if not any(self.columns):
            raise InputUnreadable(f"{name} has no header; its first row must name the columns")
        if any("\0" in column for column in self.columns):
            raise InputUnreadable(
                f"{name} has NUL characters in its header, as UTF-16 has; convert the file to "
                "UTF-8, for example with iconv -f UTF-16LE -t UTF-8"
            )
        if any(_is_other(column) for column in self.columns):
            raise InputUnreadable(
                f"{name} has a header that is not UTF-8; convert the file to UTF-8, for example "
                "with iconv -f CP949 -t UTF-8"
            )
        twice = [column for column in self.columns if self.columns.count(column) > 1]
        if twice:
            raise InputUnreadable(f"{name} has two columns of the name {twice[0]!r}; rename one")

    def _lines(self) -> Iterator[list[str]]:
        source = Input(self._place)
        self._opened.append(source)
        text = io.TextIOWrapper(source.lines(), "utf-8-sig", errors="surrogateescape", newline="")
        self._opened.append(text)
        lines, number = csv.reader(text, delimiter=self._delimiter, strict=True), -1
        try:
            for cells in filter(None, lines):  # a blank line is no row
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
        """Yield the rows, with all columns; a cell without a character is empty. A row that is
        damaged is the line that tells its error (items.bad_row)."""
        columns, width = self.columns, len(self.columns)
        lines = self._lines()
        if next(lines, None) is None:
            return
        for cells in lines:
            if len(cells) == width:
                yield {column: cell or None for column, cell in zip(columns, cells, strict=True)}
            else:
                yield bad_row(
                    f"has {len(cells)} cells, and the header names {width} columns; quote cells "
                    "that hold the delimiter"
                )

    def close(self) -> None:
        """Close the file."""
        while self._opened:
            self._opened.pop().close()


def _is_other(text: str) -> bool:
    """Whether a text has bytes that are not UTF-8."""
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


#: What tables end with, and how they are opened.
_KINDS: dict[str, Callable[[Place], ArrowTable | CsvTable]] = {
    **dict.fromkeys((".parquet", ".pq"), partial(ArrowTable, parquet=True)),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), partial(ArrowTable, parquet=False)),
    ".csv": partial(CsvTable, delimiter=","),
    ".tsv": partial(CsvTable, delimiter="\t"),
}
_COMPRESSED = (".gz", ".zst")


def kind_of(name: str) -> str:
    """Return the ending that says which kind of table a file is; '' if it is none."""
    plain = (name.partition("?")[0] if is_web(name) else name).casefold()
    for ending in _COMPRESSED:
        if plain.removesuffix(ending).endswith((".csv", ".tsv")):
            plain = plain.removesuffix(ending)
    return next((kind for kind in _KINDS if plain.endswith(kind)), "")


def open_table(place: Place) -> ArrowTable | CsvTable:
    """Open one file of a table.

    Raises:
        InputUnreadable: it cannot be read, or is damaged.
        ExtraMissing: pyarrow is not installed.
    """
    return _KINDS[kind_of(place.name)](place)


class TableSource:
    """The rows of one or several files of a table, one after the other.

    Opening it reads the columns of the first.

    Raises:
        BadOption: as RowMapping does.
        InputUnreadable, ExtraMissing: as `open_table` does.
    """

    def __init__(self, name: str, places: Sequence[Place], pairs: Mapping[str, str]) -> None:
        self.name = name
        self._places, self._pairs = places, pairs
        first = open_table(places[0])
        try:
            self._mapping = RowMapping(pairs, first.columns)
            #: The fields that columns give.
            self.fields = self._mapping.columns.keys()
            #: How many rows there are, None where the files do not say so in advance.
            self.size = first.rows if len(places) == 1 else None
        finally:
            first.close()
        #: Rows that were read.
        self.position = 0
        self.repeatable = True

    def again(self) -> TableSource:
        """Return it from its first row."""
        return TableSource(self.name, [place.anew() for place in self._places], self._pairs)

    def fingerprint(self) -> str:
        """Return that of the files and of what makes requests of their rows."""
        parts = [dict(self._pairs), *(place.fingerprint() for place in self._places)]
        return hashlib.sha256(orjson.dumps(parts)).hexdigest()

    def chunks(self, seed: str | None, max_line_bytes: int) -> Iterator[RawChunk]:
        """Yield its lines, as `reader.chunks` does.

        Raises:
            InputUnreadable: a file is damaged, or lacks a column that the first one has.
        """
        told = explain_by_row("row", self._mapping.columns)
        return chunks(LineStream(self._lines()), seed, max_line_bytes, told)

    def _lines(self) -> Iterator[bytes]:
        wanted, line = self._mapping.wanted, self._mapping.line
        for place in self._places:
            table = open_table(place)
            try:
                missing = [column for column in wanted if column not in table.columns]
                if missing:
                    raise BadOption(
                        f"{place.name} has no column {missing[0]!r}, and {self._places[0].name} has"
                    )
                if twice := [column for column in wanted if table.columns.count(column) > 1]:
                    raise BadOption(f"{place.name} has two columns {twice[0]!r}; rename one")
                for row in table.read(wanted):
                    self.position += 1
                    yield row if isinstance(row, bytes) else line(row)
            finally:
                table.close()

    def close(self) -> None:
        """Do nothing: each file is closed when it was read."""
