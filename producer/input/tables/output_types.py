"""Keeps the types of a table's columns for the output, and makes Arrow values from JSON.

A batch has the types in Redis, so that its results can be written as a table on any machine.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from producer.input.tables.arrow import pyarrow

#: Arrow's unit of time -> its nanoseconds.
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
#: Arrow's types whose names end in `_view`, and the types in which parquet stores them.
_VIEWS = {"string_view": "string", "binary_view": "binary"}
#: Function that converts a JSON value to a value of a type.
Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class InputColumns:
    """The kept columns of a table and, if known, their types and the custom_id's type.

    `types` is an Arrow schema in base64: the kept columns, then the custom_id's column if
    `typed_id`. It is '' for a table without types, such as CSV.
    """

    keep: tuple[str, ...] = ()
    types: str = ""
    typed_id: bool = False

    @classmethod
    def text_of(cls, keep: Sequence[str], custom_id: str, schema: Any) -> str:
        """Return a batch's field `kept_columns`; `schema` is Arrow's, None without types."""
        typed_id = bool(schema and custom_id) and _is_convertible(schema.field(custom_id).type)
        names = [*keep, *([custom_id] * typed_id)]
        if not names:
            return ""
        types = b""
        if schema is not None:
            fields = [
                (str(n), _column_type(schema.field(name).type)) for n, name in enumerate(names)
            ]
            types = base64.b64encode(pyarrow("a table").schema(fields).serialize())
        return orjson.dumps({"keep": keep, "types": types.decode(), "typed_id": typed_id}).decode()

    @classmethod
    def load(cls, text: str) -> InputColumns:
        """Return the columns of a batch's field `kept_columns`."""
        if not text:
            return cls()
        value = orjson.loads(text)
        return cls(tuple(value["keep"]), value["types"], value["typed_id"])

    def arrow_types(self) -> tuple[dict[str, Any], Any]:
        """Return the type of each kept column, and the custom_id's type."""
        arrow = pyarrow("a table with kept columns")
        types = [arrow.string()] * (len(self.keep) + 1)
        if self.types:
            raw = arrow.py_buffer(base64.b64decode(self.types))
            schema = pyarrow("a table", "ipc").read_schema(raw)
            types[: len(schema)] = schema.types
        return dict(zip(self.keep, types, strict=False)), types[-1]


def _is_convertible(kind: Any) -> bool:
    """Whether a custom_id's text can be converted to its column's type."""
    types = pyarrow("a table", "types")
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return numeric or (types.is_temporal(kind) and not types.is_duration(kind))


def _column_type(kind: Any) -> Any:
    """Return the type of a column in the output.

    A dictionary of texts, which pandas calls a category, stays a dictionary. It is unordered,
    because the order of its values is not in its type.
    """
    arrow, plain_type = pyarrow("a table"), output_type(kind)
    types = pyarrow("a table", "types")
    is_text = types.is_string(plain_type) or types.is_large_string(plain_type)
    if types.is_dictionary(kind) and is_text:
        return arrow.dictionary(arrow.int32(), plain_type)
    return plain_type


def output_type(kind: Any) -> Any:
    """Return the type of cells in the output: the input's type, or the nearest one of parquet."""
    arrow, types = pyarrow("a table"), pyarrow("a table", "types")
    if isinstance(kind, arrow.BaseExtensionType):
        if kind.extension_name in ("arrow.json", "arrow.uuid"):
            return arrow.string()
        return (
            arrow.bool_()
            if kind.extension_name == "arrow.bool8"
            else output_type(kind.storage_type)
        )
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return output_type(kind.value_type)
    if types.is_union(kind) or types.is_interval(kind):
        return arrow.string()
    if types.is_float16(kind):
        return arrow.float32()
    if types.is_decimal(kind) and kind.bit_width < 128:
        return arrow.decimal128(kind.precision, kind.scale)
    if str(kind) in _VIEWS:
        return arrow.type_for_alias(_VIEWS[str(kind)])
    return _nested_type(arrow, types, kind)


def _nested_type(arrow: Any, types: Any, kind: Any) -> Any:
    if types.is_struct(kind):
        fields = [kind.field(n) for n in range(kind.num_fields)]
        return arrow.struct([(field.name, output_type(field.type)) for field in fields])
    if types.is_map(kind):
        return arrow.map_(output_type(kind.key_type), output_type(kind.item_type))
    if types.is_fixed_size_list(kind):
        return arrow.list_(output_type(kind.value_type), kind.list_size)
    return arrow.list_(output_type(kind.value_type)) if types.is_nested(kind) else kind


def converter(kind: Any) -> Convert:
    """Return the function that converts a cell's JSON, or a custom_id, to a value of a type."""
    inner = _converter(kind)
    return lambda value: None if value is None else inner(value)


def _converter(kind: Any) -> Convert:
    types = pyarrow("a table", "types")
    if types.is_integer(kind):
        return int
    if types.is_floating(kind):
        return float
    if types.is_decimal(kind):
        return lambda value: decimal.Decimal(str(value))
    if types.is_boolean(kind):
        return lambda value: value in (True, "true")
    if types.is_null(kind):
        return lambda value: None
    if types.is_nested(kind):
        return _nested_converter(types, kind)
    if types.is_temporal(kind):
        return _time_converter(types, kind)
    return base64.b64decode if "binary" in str(kind) else text_of_json


def text_of_json(value: Any) -> str:
    """Return a text as it is, and any other JSON value as JSON."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _time_converter(types: Any, kind: Any) -> Convert:
    if types.is_date(kind):
        return lambda text: dt.date.fromisoformat(text[:10])
    unit = _NANOSECONDS[kind.unit]
    if types.is_duration(kind):
        return lambda seconds: round(decimal.Decimal(str(seconds)) * 10**9) // unit
    return partial(_units, unit, types.is_time(kind))


def _units(unit: int, is_time: bool, text: str) -> int:
    """Return an ISO time as a number of units, of `unit` ns, since midnight or since 1970."""
    moment = dt.datetime.fromisoformat(f"1970-01-01T{text}" if is_time else text)
    since = moment.replace(tzinfo=moment.tzinfo or dt.UTC) - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    digits = text.partition(".")[2]
    digits = digits[: next((n for n, c in enumerate(digits) if not c.isdigit()), len(digits))]
    whole = (since.days * 86_400 + since.seconds) * 10**9
    return (whole + int(f"{digits:0<9}" if digits else 0)) // unit


def _nested_converter(types: Any, kind: Any) -> Convert:
    if types.is_struct(kind):
        fields = {f.name: converter(f.type) for f in map(kind.field, range(kind.num_fields))}
        return lambda value: {name: get(value.get(name)) for name, get in fields.items()}
    if types.is_map(kind):
        key, item = converter(kind.key_type), converter(kind.item_type)
        return lambda value: [(key(name), item(one)) for name, one in value.items()]
    element = converter(kind.value_type)
    return lambda value: [element(one) for one in value]


def array(values: Sequence[Any], kind: Any) -> Any:
    """Return an Arrow array of values of a type."""
    return pyarrow("a table").array(values, kind)


def read_cells(text: bytes) -> Mapping[str, Any]:
    """Return the kept cells of a row from their JSON."""
    cells: dict[str, Any] = orjson.loads(text) if text else {}
    return cells
