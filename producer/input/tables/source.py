"""Reads the rows of parquet, Arrow and CSV files as lines."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from producer.input.bucket import is_web
from producer.input.iterable import bad_row, explain_by_row, row_chunks
from producer.input.options import BadOption
from producer.input.reader import Input, InputUnreadable, Place, RawChunk
from producer.input.tables.arrow import ArrowTable
from producer.input.tables.hive import Table, TableOfFolder
from producer.input.tables.mapping import Row, RowMapping
from producer.input.tables.output_types import InputColumns

#: The longest row, in bytes, while only columns are read: WARMQ_MAX_LINE_BYTES by default.
_LONGEST = 10 * 2**20
#: A CSV cell may have so many times that in characters: its row then fails alone. The limit bounds
#: what a quote without an end takes of the file.
_CELL_LIMIT = 4


class CsvTable:
    """A CSV file, which may be compressed; its cells are texts, `delimiter` is one character."""

    rows: int | None = None
    #: CSV has no types.
    schema: Any = None

    def __init__(self, place: Place, delimiter: str, longest: int = _LONGEST) -> None:
        self._place, self._delimiter, self._longest = place, delimiter, longest
        self._opened: list[Any] = []
        # The limit is one of the process, and Python's own is 128 KB.
        csv.field_size_limit(max(csv.field_size_limit(), _CELL_LIMIT * longest))
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
        lines = csv.reader(text, delimiter=self._delimiter, strict=True)
        number, before = -1, 0
        try:
            for cells in lines:
                before = lines.line_num
                if cells:  # a blank line is not a row
                    number += 1
                    yield cells
        except csv.Error as error:
            problem = self._problem(str(error), number, before + 1, lines.line_num)
            raise InputUnreadable(f"{self._place.name}: {problem}") from None
        except (OSError, EOFError) as error:
            raise InputUnreadable(f"{self._place.name}: after row {number}: {error}") from None

    def _problem(self, error: str, number: int, first: int, line: int) -> str:
        """Return an error of the row after `number`, in the lines `first` to `line`, its remedy."""
        remedy = 'write a quote inside a quoted cell twice, ""'
        if error == "unexpected end of data":
            row = "header" if number < 0 else f"row {number + 1}"
            return f"{row}, from line {first}: a quote has no end; close it, or {remedy}"
        if not error.startswith("field larger"):
            return f"after row {max(0, number)}, line {line}: {error}; {remedy}"
        if first == line:
            return (
                f"row {number + 1}, line {line}, longer than {self._longest} bytes; shorten it, or "
                "raise WARMQ_MAX_LINE_BYTES"
            )
        return (  # most likely its quote has no end
            f"row {number + 1}, from line {first}: a quoted cell has more than "
            f"{csv.field_size_limit()} characters in several lines; {remedy}, or shorten the cell, "
            "or raise WARMQ_MAX_LINE_BYTES"
        )

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


#: Characters that may separate the cells of a CSV file.
_DELIMITERS = (",", ";", "|", "\t")


def _check_delimiter(table: Table, part: TablePart, pairs: Mapping[str, str]) -> None:
    """Raise InputUnreadable for a CSV file whose cells another character seems to separate."""
    header = table.columns[0] if part.kind in (".csv", ".tsv") and table.columns else ""
    if header.startswith("sep="):
        mark = header[len("sep=") :] or part.delimiter or ("\t" if part.kind == ".tsv" else ",")
        raise _other_delimiter(part, mark, f"; remove the file's first line, sep={mark}")
    if len(table.columns) - len(part.keys) > 1 or any(header in given for given in pairs.values()):
        return
    if mark := other_delimiter(table.columns):
        raise _other_delimiter(part, mark)


def other_delimiter(columns: Sequence[str]) -> str:
    """Return the delimiter inside the only column of a CSV file's header; '' without one."""
    header = columns[0] if len(columns) == 1 and not columns[0].startswith("sep=") else ""
    return next((mark for mark in _DELIMITERS if mark in header), "")


def _other_delimiter(part: TablePart, mark: str, more: str = "") -> InputUnreadable:
    delimiter = mark.replace("\t", "tab")
    text = f"{part.name}: its delimiter looks like '{delimiter}'{more}"
    return InputUnreadable(text, remedy="give_delimiter", delimiter=delimiter)


#: File endings, and the function that opens such a file; that of CSV is CsvTable.
_KINDS: dict[str, Callable[[Place], Table]] = {
    **dict.fromkeys((".parquet", ".parq", ".pq"), partial(ArrowTable, parquet=True)),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), partial(ArrowTable, parquet=False)),
}
#: Endings of CSV files, and their usual delimiter.
_CSV = {".csv": ",", ".tsv": "\t"}
#: Endings that a CSV file may have in addition.
_COMPRESSED = (".gz", ".zst")


def kind_of(name: str) -> str:
    """Return the ending that names a table's kind; '' for other files."""
    plain = (name.partition("?")[0] if is_web(name) else name).casefold()
    for ending in _COMPRESSED:
        if plain.removesuffix(ending).endswith(tuple(_CSV)):
            plain = plain.removesuffix(ending)
    return next((kind for kind in (*_KINDS, *_CSV) if plain.endswith(kind)), "")


def columns_of(place: Place, delimiter: str = "") -> Sequence[str]:
    """Return the columns of a table; () for another file. Raises InputUnreadable, ExtraMissing."""
    if not (kind := kind_of(place.name)):
        return ()
    table = TablePart(place, kind, delimiter=delimiter).open()
    table.close()
    return table.columns


@dataclass(frozen=True)
class TablePart:
    """A file of a table: its kind, the columns of its folders, and a CSV file's delimiter."""

    place: Place
    kind: str
    keys: Mapping[str, str | None] = field(default_factory=dict)
    delimiter: str = ""

    @property
    def name(self) -> str:
        return self.place.name

    def reopen(self) -> TablePart:
        """Return the part as it is now."""
        return replace(self, place=self.place.reopen())

    def fingerprint(self) -> str:
        """Return a text that changes with the content."""
        more = orjson.dumps([self.keys, self.delimiter]).decode()
        plain = not (self.keys or self.delimiter)
        return self.place.fingerprint() if plain else self.place.fingerprint() + more

    def open(self, max_line_bytes: int = _LONGEST) -> Table:
        """Open the file and read its columns."""
        if delimiter := self.delimiter or _CSV.get(self.kind):
            table: Table = CsvTable(self.place, delimiter, max_line_bytes)
        else:
            table = _KINDS[self.kind](self.place)
        return TableOfFolder(table, self.keys) if self.keys else table


class TableSource:
    """A source over the rows of one or several tables; the first one's columns count.

    `keep` are columns for the output (KeptColumns.of). Raises BadOption for a bad mapping,
    InputUnreadable and ExtraMissing.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[TablePart],
        pairs: Mapping[str, str],
        keep: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._parts, self.pairs, self.keep = parts, pairs, keep
        #: The delimiter of CSV files; '' is the usual one of their ending.
        self.delimiter = parts[0].delimiter
        first = parts[0].open()
        try:
            _check_delimiter(first, parts[0], pairs)
            self._mapping = RowMapping(pairs, first.columns, keep)
            #: Columns that are neither used nor kept.
            self.unused = self._mapping.unused
            #: The kept columns with their types, as the batch's field `kept_columns`.
            self.output_columns = self._output_columns(first)
            #: Fields that come from columns.
            self.fields = self._mapping.columns.keys()
            #: Number of rows; None if unknown.
            self.size = first.rows if len(parts) == 1 else None
        finally:
            first.close()
        #: Rows read so far.
        self.position = 0
        self.repeatable = True

    def reopen(self) -> TableSource:
        """Return the source from its first row."""
        parts = [part.reopen() for part in self._parts]
        return TableSource(self.name, parts, self.pairs, self.keep)

    def _output_columns(self, table: Table) -> str:
        mapping = self._mapping
        return InputColumns.text_of(mapping.kept.names, mapping.custom_id, table.schema)

    def fingerprint(self) -> str:
        """Return a digest of the mapping and the files' fingerprints."""
        options = [dict(self.pairs), *([list(self.keep)] if self.keep else [])]
        texts = [*options, *(part.fingerprint() for part in self._parts)]
        return hashlib.sha256(orjson.dumps(texts)).hexdigest()

    def chunks(self, seed: str | None, max_line_bytes: int) -> Iterator[RawChunk]:
        """Yield the chunks of `row_chunks`; raise BadOption if a file lacks a column."""
        explain = explain_by_row("row", self._mapping.columns)
        return row_chunks(self._lines(max_line_bytes), seed, max_line_bytes, explain)

    def _lines(self, max_line_bytes: int) -> Iterator[bytes]:
        wanted, line, kept = self._mapping.wanted, self._mapping.line, self._mapping.kept
        for part in self._parts:
            table = part.open(max_line_bytes)
            try:
                for column in wanted:
                    count = table.columns.count(column)
                    if count == 0:
                        raise BadOption(
                            f"{part.name} has no column {column!r}, which "
                            f"{self._parts[0].name} has; give only files with the same columns"
                        )
                    if count > 1:
                        raise BadOption(f"{part.name} has two columns {column!r}; rename one")
                if self._output_columns(table) != self.output_columns:
                    raise BadOption(
                        f"{part.name} has other types in its kept columns or custom_id than "
                        f"{self._parts[0].name}; give them the same types"
                    )
                for row in table.read(wanted):
                    self.position += 1
                    yield kept.after(row, {}) if isinstance(row, bytes) else line(row)
            finally:
                table.close()

    def close(self) -> None:
        """Do nothing: each file is closed when it has been read."""
