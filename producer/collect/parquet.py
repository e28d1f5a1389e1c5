"""Writes results as a parquet table, with a row for each request."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from contract.results import ResultLine
from producer.collect.columns import NUMBERS, REPEATED, OutputColumns
from producer.input.files import OutputUnwritable
from producer.input.tables.arrow import pyarrow
from producer.input.tables.output_types import array, converter

#: Rows or bytes after which a row group is written; until then it is in Arrow's memory.
_GROUP_ROWS, _GROUP_BYTES = 50_000, 8 * 2**20
#: Rows or bytes after which Python objects are converted to Arrow, which takes less memory.
_PIECE_ROWS, _PIECE_BYTES = 500, 2**20
#: Type of a property -> Arrow's name of it.
_TYPES = {"integer": "int64", "number": "float64", "boolean": "bool", "string": "string"}


class _Sink(io.RawIOBase):
    """The file that pyarrow writes to; passes bytes to a function."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._position = 0

    def drop(self) -> None:
        """Ignore further bytes: pyarrow writes a footer even to an abandoned file."""
        self._write = lambda data: None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._write(bytes(data))
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position


class ParquetLines:
    """Writes results as parquet, a row group at a time; `write` takes the bytes."""

    def __init__(self, write: Callable[[bytes], None], columns: OutputColumns) -> None:
        self._arrow, parquet = pyarrow("a table of results"), pyarrow("results", "parquet")
        self._columns = columns
        types = dict.fromkeys(columns.names, self._arrow.string())
        types |= dict.fromkeys(NUMBERS, self._arrow.int64())
        types |= {
            name: self._arrow.type_for_alias(_TYPES[kind])
            for name, kind in columns.properties.values()
        }
        kept, custom_id = columns.input.arrow_types()
        types |= {columns.kept[name]: kind for name, kind in kept.items()}
        #: Column -> the function that converts its cells from JSON values.
        self._converters = {columns.kept[name]: converter(kind) for name, kind in kept.items()}
        if columns.input.typed_id:
            types["custom_id"] = custom_id
            self._converters["custom_id"] = _or_none(converter(custom_id))
        self._schema = self._arrow.schema(list(types.items()))
        self._sink = _Sink(write)
        file = self._arrow.PythonFile(self._sink, mode="w")
        self._writer = parquet.ParquetWriter(
            file, self._schema, compression="zstd", use_dictionary=list(REPEATED),
            write_statistics=False,
        )  # fmt: skip
        self._rows: list[dict[str, Any]] = []
        self._rows_size = 0
        self._batches: list[Any] = []
        self._open = True

    @staticmethod
    def check(name: str) -> None:
        """Raise ExtraMissing if pyarrow is not installed."""
        pyarrow(name, "parquet")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._sink.drop()

    def add(self, line: ResultLine) -> None:
        """Append a result."""
        self._rows.append(self._columns.row(line))
        self._rows_size += len(line.json)
        if len(self._rows) >= _PIECE_ROWS or self._rows_size >= _PIECE_BYTES:
            self._convert_rows()
            rows = sum(batch.num_rows for batch in self._batches)
            if rows >= _GROUP_ROWS or sum(b.nbytes for b in self._batches) >= _GROUP_BYTES:
                self._write_group()

    def _convert_rows(self) -> None:
        rows, self._rows, self._rows_size = self._rows, [], 0
        arrays = [self._array(field, [row[field.name] for row in rows]) for field in self._schema]
        self._batches.append(self._arrow.RecordBatch.from_arrays(arrays, schema=self._schema))

    def _array(self, field: Any, cells: list[Any]) -> Any:
        try:
            if convert := self._converters.get(field.name):
                cells = list(map(convert, cells))
            return array(cells, field.type)
        except (self._arrow.ArrowException, ArithmeticError, TypeError, ValueError) as error:
            raise OutputUnwritable(
                f"cannot write column {field.name} as {field.type}: {error}; name a .jsonl file"
            ) from None

    def _write_group(self) -> None:
        batches, self._batches = self._batches, []
        table = self._arrow.Table.from_batches(batches, schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def finish(self) -> None:
        """Write the remaining rows and the footer."""
        if self._open:
            self._convert_rows()
            self._write_group()
            self._open = False
            self._writer.close()


def _or_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a conversion that gives None for `line-7`, the custom_id of a row without one."""

    def converted(text: Any) -> Any:
        with suppress(ValueError, ArithmeticError):
            return convert(text)

    return converted
