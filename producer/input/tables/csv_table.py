"""Reads CSV: comma or tab, with a header, also compressed. Each cell is a text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from producer.input.reader import Input, InputUnreadable, Place
from producer.input.rows import bad_row
from producer.input.tables.table import Row

#: Longest cell, in characters: as long as a line may be by default. Python's own limit is 128 KB.
_CELL = 10 * 2**20


class CsvTable:
    """One CSV file. `delimiter` is `,` or a tab.

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
        """Yield the rows; a cell without a character is empty."""
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
