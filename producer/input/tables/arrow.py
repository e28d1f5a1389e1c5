"""Reads parquet and Arrow files of any size, a few hundred rows at a time, with pyarrow.

Arrow's `to_pylist` gives every struct all keys of its column, maps as lists of pairs, float32 as
the nearest double, and fails for a whole record batch if Python cannot represent one cell. This
module leaves out keys without a value, returns maps as objects and numbers in their shortest form,
and returns a BadCell for such a cell.
"""

from __future__ import annotations

import datetime as dt
import importlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from contract.errors import ExtraMissing
from producer.input.reader import CHUNK_LINES, FilePlace, InputUnreadable, Place
from producer.input.tables.cells import BadCell, duration_of, json_of, key_of

#: Bytes of a column that are read at a time; without it, Arrow reads all columns of a row group.
_BUFFER = 2**20
#: First bytes of an Arrow file; an Arrow stream begins differently.
_ARROW_FILE = b"ARROW1"
#: Bits of a float -> its format for `struct`, and the numbers of digits to try.
_SHORT_FLOATS = {16: ("e", range(1, 6)), 32: ("f", range(1, 10))}
_JSON = "arrow.json"
#: Extension types that Arrow converts to Python values; for other types it gives the stored value.
_KNOWN = ("arrow.uuid", "arrow.bool8")
_PERIOD = "pandas.period"

#: Schema, number of rows if known, and a function that reads the named columns as record batches.
_Table = tuple[Any, int | None, Callable[[Sequence[str]], Iterator[Any]]]
#: Function that returns the Python value of an Arrow scalar.
_Read = Callable[[Any], Any]


def pyarrow(what: str, module: str = "") -> Any:
    """Return pyarrow or a module of it; raise ExtraMissing for `what` if it is not installed."""
    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise ExtraMissing(
            f"{what}: needs pyarrow ({error}): pip install 'warmq[tables]'"
        ) from None


def pieces(batch: Any, wanted: Sequence[str]) -> Iterator[Any]:
    """Yield the wanted columns of a record batch, a few hundred rows at a time."""
    kept = batch.select(list(wanted))
    for start in range(0, kept.num_rows, CHUNK_LINES):
        yield kept.slice(start, CHUNK_LINES)


class ArrowTable:
    """A parquet file, or an Arrow file or stream. `rows` is None if their number is unknown.

    Opening and reading raise InputUnreadable.
    """

    def __init__(self, place: Place, *, parquet: bool) -> None:
        self.name = place.name
        self._errors = (pyarrow(place.name).ArrowException, OSError, ValueError)
        self._file = _open_file(place, "OSFile" if parquet else "memory_map")
        try:
            table = (_open_parquet if parquet else _open_arrow)(self._file)
        except self._errors as error:
            self._file.close()
            raise self._damaged(error) from None
        self.schema, self.rows, self._batches = table
        self.columns: Sequence[str] = self.schema.names

    def read(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the rows, with the wanted columns."""
        row = 0
        try:
            for batch in self._batches(wanted):
                for cells in rows_of(batch):
                    row += 1
                    yield cells
        except self._errors as error:
            raise self._damaged(error, row) from None

    def _damaged(self, error: Exception, row: int = 0) -> InputUnreadable:
        text = str(error).partition("\n")[0]
        where = f"after row {row}: " if row else ""
        return InputUnreadable(f"cannot read {self.name}: {where}{text}")

    def close(self) -> None:
        with suppress(*self._errors):
            self._file.close()


def _open_file(place: Place, opener: str) -> Any:
    """Open a place as a file of pyarrow; `opener` is pyarrow's function for a local file."""
    arrow, stream = pyarrow(place.name), place.open(in_order=False)  # raises our own errors
    if not (isinstance(place, FilePlace) and place.size()):
        return arrow.PythonFile(stream, mode="r")
    stream.close()
    return getattr(arrow, opener)(place.name)


def _open_parquet(file: Any) -> _Table:
    table = pyarrow("a table", "parquet").ParquetFile(
        file,
        buffer_size=_BUFFER,
        pre_buffer=False,
        coerce_int96_timestamp_unit="us",  # nanoseconds in 64 bits end in 2262
    )

    def batches(wanted: Sequence[str]) -> Iterator[Any]:
        return iter(table.iter_batches(CHUNK_LINES, columns=wanted, use_threads=False))

    return table.schema_arrow, table.metadata.num_rows, batches


def _open_arrow(file: Any) -> _Table:
    """Open an Arrow file or stream; Hugging Face's `datasets` writes streams as `.arrow`.

    One record batch is in memory at a time, and its writer decided its size; local files are
    mapped into memory.
    """
    ipc = pyarrow("a table", "ipc")
    is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
    file.seek(0)
    table = (ipc.open_file if is_file else ipc.open_stream)(file)

    def batches(wanted: Sequence[str]) -> Iterator[Any]:
        whole = map(table.get_batch, range(table.num_record_batches)) if is_file else table
        for batch in whole:
            yield from pieces(batch, wanted)

    return table.schema, None, batches


def rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch as dicts; an unreadable cell is a BadCell."""
    names = batch.schema.names
    columns = [_cells(batch.schema.field(n), batch.column(n)) for n in range(len(names))]
    if not columns:
        yield from ({} for _ in range(batch.num_rows))
    for cells in zip(*columns, strict=True):
        yield dict(zip(names, cells, strict=True))


def _cells(field: Any, column: Any) -> list[Any]:
    name, read = field.name, _reader(column.type)
    # Without pandas, Arrow does not know the type `pandas.period`; only the metadata has its name.
    if (field.metadata or {}).get(b"ARROW:extension:name") == _PERIOD.encode():
        read = _refuse_period
    if read is None:
        try:
            return list(column.to_pylist())
        except Exception:
            read = _as_python
    return [_cell(name, scalar, read) for scalar in column]


def _cell(name: str, scalar: Any, read: _Read) -> Any:
    try:
        return read(scalar) if scalar.is_valid else None
    except UnicodeDecodeError:
        return BadCell(name, "is not UTF-8; convert it to UTF-8")
    except Exception as error:
        text = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, KeyError):  # the error's text is only the name of a time zone
            text = f"this machine does not know {error}"
        return BadCell(name, f"cannot be read: {text}; make the column a text")


def _as_python(scalar: Any) -> Any:
    return scalar.as_py()


def _inner(kind: Any) -> _Read:
    """Return a reader for values inside a list, map or struct; a null is None."""
    read = _reader(kind) or _as_python

    def inner(scalar: Any) -> Any:
        return read(scalar) if scalar.is_valid else None

    return inner


def _reader(kind: Any) -> _Read | None:
    """Return a reader for values of an Arrow type; None if `to_pylist` reads them well."""
    types = pyarrow("a table", "types")
    if isinstance(kind, pyarrow("a table").BaseExtensionType):
        return _extension_reader(kind)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        inner = _inner(kind.value_type)
        return lambda scalar: inner(scalar.value)
    if types.is_floating(kind):
        return partial(_float, kind.bit_width)
    if types.is_temporal(kind):
        return _time_reader(types, kind)
    return _nested_reader(types, kind)


def _extension_reader(kind: Any) -> _Read | None:
    name = kind.extension_name
    if name in _KNOWN:
        return None
    if name == _JSON:
        return lambda scalar: json_of(scalar.value.as_py())
    if name == _PERIOD:
        return _refuse_period
    inner = _inner(kind.storage_type)
    return lambda scalar: inner(scalar.value)


def _refuse_period(_: Any) -> Any:
    raise ValueError("a period of pandas is a bare number in Arrow (astype(str) makes it a text)")


def _refuse_double_key(_: Any) -> Any:
    raise ValueError("its objects have a key twice")


def _nested_reader(types: Any, kind: Any) -> _Read | None:
    if types.is_map(kind):
        return partial(_map, _inner(kind.key_type), _inner(kind.item_type))
    if types.is_struct(kind):
        fields = [(kind.field(n).name, n, _inner(kind.field(n).type)) for n in range(len(kind))]
        if len({name for name, _, _ in fields}) < len(fields):
            return _refuse_double_key
        return lambda scalar: {
            name: value for name, n, read in fields if (value := read(scalar[n])) is not None
        }
    if types.is_nested(kind) and hasattr(kind, "value_type"):
        element = _inner(kind.value_type)
        return lambda scalar: [element(one) for one in scalar.values]
    if types.is_union(kind):
        return lambda scalar: None if (one := scalar.value) is None else _inner(one.type)(one)
    return None


def _map(key: _Read, value: _Read, scalar: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in scalar.values:
        name = key_of(key(pair[0]))
        if name in values:
            raise ValueError(f"a map has the key {name[:140]!r} twice")
        values[name] = value(pair[1])
    return values


def _float(width: int, scalar: Any) -> Any:
    """Return the shortest number equal to a float of `width` bits; an int for a whole one."""
    value = float(scalar.as_py())
    if math.isnan(value):
        return None
    if math.isinf(value):
        raise ValueError("it is infinite, and JSON has no such number")
    if value.is_integer() and abs(value) < 2**53:
        return int(value)
    code, digits = _SHORT_FLOATS.get(width, ("d", range(0)))
    for count in digits:
        short = float(f"{value:.{count}g}")
        with suppress(OverflowError):  # rounded up above the largest float
            if struct.unpack(code, struct.pack(code, short))[0] == value:
                return short
    return value


def _time_reader(types: Any, kind: Any) -> _Read | None:
    """Return a reader for times in nanoseconds, which Python's types cannot hold; else None."""
    if getattr(kind, "unit", "") != "ns":
        return None
    arrow = pyarrow("a table")
    if types.is_timestamp(kind):
        micro = arrow.timestamp("us", kind.tz)
    elif types.is_time(kind):
        micro = arrow.time64("us")
    else:
        return lambda scalar: duration_of(scalar.value)
    return partial(_nanoseconds, arrow, micro)


def _nanoseconds(arrow: Any, micro: Any, scalar: Any) -> dt.datetime | dt.time | str:
    """Return a time; as text if it has more digits than Python's microseconds."""
    whole, rest = divmod(scalar.value, 1000)
    moment: dt.datetime | dt.time = arrow.scalar(whole, micro).as_py()
    if not rest:
        return moment
    text = moment.isoformat(timespec="microseconds")
    at = text.index(".") + 7
    return f"{text[:at]}{rest:03}{text[at:]}"
