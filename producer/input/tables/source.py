"""A table as a source of lines: one for each row, numbered from 1."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import orjson

from producer.input.bucket import is_web
from producer.input.items import LineStream
from producer.input.options import BadOption
from producer.input.reader import Place, RawChunk, chunks
from producer.input.rows import told_by_row
from producer.input.tables.arrow_table import ArrowTable, ParquetTable
from producer.input.tables.csv_table import CsvTable
from producer.input.tables.mapping import RowMapping
from producer.input.tables.table import Table

#: What tables end with, and how they are opened.
_KINDS: dict[str, Callable[[Place], Table]] = {
    ".parquet": ParquetTable, ".pq": ParquetTable,
    ".arrow": ArrowTable, ".feather": ArrowTable, ".ipc": ArrowTable,
    ".csv": lambda place: CsvTable(place, ","), ".tsv": lambda place: CsvTable(place, "\t"),
}  # fmt: skip
_COMPRESSED = (".gz", ".zst")


def kind_of(name: str) -> str:
    """Return the ending that says which kind of table a file is; '' if it is none."""
    plain = (name.partition("?")[0] if is_web(name) else name).casefold()
    for ending in _COMPRESSED:
        if plain.removesuffix(ending).endswith((".csv", ".tsv")):
            plain = plain.removesuffix(ending)
    return next((kind for kind in _KINDS if plain.endswith(kind)), "")


def open_table(place: Place) -> Table:
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
        told = told_by_row("row", self._mapping.columns)
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
