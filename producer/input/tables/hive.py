"""Reads columns from the names of folders: `day=2/part-0.parquet` (Hive's form)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Protocol
from urllib.parse import unquote

from producer.input.tables.arrow import pyarrow

#: Hive's name for the folder of rows without a value.
_NULL = "__HIVE_DEFAULT_PARTITION__"


class Table(Protocol):
    """A table that has been opened; its rows are dicts, or the lines of bad rows."""

    columns: Sequence[str]
    rows: int | None
    #: Arrow's schema; None for a table without types.
    schema: Any

    def read(self, wanted: Sequence[str]) -> Iterator[Mapping[str, Any] | bytes]: ...

    def close(self) -> None: ...


def keys_of(file: str, base: str) -> dict[str, str | None]:
    """Return the columns in the names of a file's folders, below `base` and at its end."""
    keys: dict[str, str | None] = {}
    above = PurePosixPath(base)
    while "=" in above.name:
        file, above = f"{above.name}/{file.removeprefix(base)}", above.parent
        base = ""
    for part in PurePosixPath(file.removeprefix(base)).parts[:-1]:
        name, equals, value = part.partition("=")
        if name and equals:
            keys[unquote(name)] = None if value == _NULL else unquote(value)
    return keys


class TableOfFolder:
    """A table with the columns of its folders, which are texts.

    If the table has a column of the same name, the table's is used.
    """

    def __init__(self, table: Table, keys: Mapping[str, str | None]) -> None:
        self._table = table
        self._own = frozenset(table.columns)
        self._keys = {name: value for name, value in keys.items() if name not in self._own}
        self.columns: Sequence[str] = [*table.columns, *self._keys]
        self.rows = table.rows
        self.schema: Any = table.schema
        for name in self._keys if self.schema is not None else ():
            arrow = pyarrow("a table")
            self.schema = self.schema.append(arrow.field(name, arrow.string()))

    def read(self, wanted: Sequence[str]) -> Iterator[Mapping[str, Any] | bytes]:
        """Yield each row as a dict, a bad row as the line with its error."""
        keys = self._keys
        for row in self._table.read([name for name in wanted if name in self._own]):
            yield row if isinstance(row, bytes) else {**row, **keys}

    def close(self) -> None:
        self._table.close()
