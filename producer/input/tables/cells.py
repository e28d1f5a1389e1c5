"""Converts cells of tables, pandas and numpy to texts and JSON values."""

from __future__ import annotations

import ast
import datetime as dt
import decimal
import enum
import json
import math
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

#: Bound below which each whole float is equal to one integer only.
_EXACT = 2**53
#: Options of orjson. Times go to `plain`, because orjson writes 00:00:14.010000 as 00:00:14.10000.
JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATETIME
_TIMES = (dt.datetime, dt.date, dt.time)
#: Pattern of 20 digits in a row: only JSON with them can have an integer of more than 64 bits.
_MANY_DIGITS = re.compile(r"\d{20}")
#: Names of pandas' types of missing values. The types are compared, because NA == value fails.
_MISSING = ("NAType", "NaTType")


class BadCell(Exception):
    """A cell that cannot be converted; `problem` ends with the remedy."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(problem)
        self.column = column
        self.problem = problem


class Duration:
    """A duration in nanoseconds, more precise than Python's own."""

    def __init__(self, nanoseconds: int) -> None:
        self.nanoseconds = nanoseconds

    def __str__(self) -> str:
        whole, rest = divmod(self.nanoseconds, 1000)
        text = str(dt.timedelta(microseconds=whole))
        if not rest:
            return text
        return f"{text if '.' in text else text + '.000000'}{rest:03}"


def duration_of(nanoseconds: int) -> dt.timedelta | Duration:
    """Return a duration, as Python's timedelta if that is exact."""
    whole, rest = divmod(nanoseconds, 1000)
    return Duration(nanoseconds) if rest else dt.timedelta(microseconds=whole)


def empty(column: str) -> BadCell:
    """Return the error for an empty cell where a value is required."""
    return BadCell(column, "is empty; fill it, or leave the row out")


def text_of(column: str, value: Any) -> str:
    """Return a cell as text; raise BadCell if it is empty or has bytes."""
    if isinstance(value, str):
        return value
    value = value_of(column, value)
    if value is None:
        raise empty(column)
    if isinstance(value, bool | list | dict):
        return _json(column, value).decode()
    if isinstance(value, _TIMES):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, int | float | uuid.UUID | dt.timedelta | Duration):
        return str(value)
    written = _json(column, value)  # refuses values that JSON does not have
    text = orjson.loads(written)
    return text if isinstance(text, str) else written.decode()


def value_of(column: str, value: Any) -> Any:
    """Return a cell as a JSON value: None for NaN, an int for 16.0.

    Raises BadCell for bytes, infinite numbers and unreadable cells.
    """
    if isinstance(value, BadCell):
        raise value
    if isinstance(value, float | decimal.Decimal) and not math.isfinite(value):
        if math.isnan(value):
            return None
        raise BadCell(column, "is infinite, and JSON has no such number; give a finite one")
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, bytes | bytearray | memoryview):
        raise BadCell(column, "holds bytes, and a request has texts; decode the column first")
    return value


def key_of(value: Any) -> str:
    """Return a value as an object's key; raise ValueError for bytes."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        raise ValueError("a key holds bytes, and a request has texts")
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    return orjson.dumps(value, plain, JSON).decode().strip('"')


def json_of(text: str) -> Any:
    """Decode JSON; raise ValueError if it is invalid or has an integer of more than 64 bits."""
    value = orjson.loads(text)
    if _MANY_DIGITS.search(text):
        json.loads(text, parse_int=_within_64_bits)
    return value


def _within_64_bits(digits: str) -> None:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise ValueError("it has an integer of more than 64 bits")


def list_or_object(column: str, value: Any) -> Any:
    """Return a text's JSON value if it is a list or object, otherwise the text."""
    decoded = parsed(column, value)
    return decoded if isinstance(decoded, list | dict) else value


def list_object_or_null(column: str, value: Any) -> Any:
    """Return a text's JSON value if it is a list, object or null, otherwise the text."""
    decoded = parsed(column, value)
    return decoded if decoded is None or isinstance(decoded, list | dict) else value


def texts_or_json(column: str, value: Any) -> Any:
    """Return `list_or_object`; raise BadCell for a list in Python's syntax (pandas writes it)."""
    decoded = list_or_object(column, value)
    if isinstance(decoded, str) and decoded[:1] == "[" and decoded[-1:] == "]":
        try:
            is_list = isinstance(ast.literal_eval(decoded), list)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return decoded
        if is_list:
            raise BadCell(column, 'is a list as Python writes it; write it as JSON: ["a", "b"]')
    return decoded


def parsed(column: str, value: Any) -> Any:
    """Return a text's JSON value, or the text if it is not JSON.

    Raises BadCell for an integer of more than 64 bits.
    """
    if not isinstance(value, str):
        return value
    try:
        return json_of(value)
    except orjson.JSONDecodeError:
        return value
    except (ValueError, RecursionError) as error:
        raise BadCell(column, f"cannot be read: {error}; write it as a text") from None


def plain(value: object) -> Any:
    """Convert a value that orjson does not know to JSON; raise TypeError if that is impossible."""
    if isinstance(value, Duration):
        value = decimal.Decimal(value.nanoseconds).scaleb(-9)
    if isinstance(value, decimal.Decimal):
        if value == value.to_integral_value():
            return int(value)
        near = float(value)
        return near if decimal.Decimal(repr(near)) == value else orjson.Fragment(f"{value:f}")
    if isinstance(value, dt.timedelta):
        seconds = value.total_seconds()
        return int(seconds) if seconds.is_integer() else seconds
    if isinstance(value, _TIMES):
        return value.isoformat()
    raise TypeError(f"type {type(value).__name__} is not a JSON value")


def not_json(row: Mapping[str, Any]) -> BadCell:
    """Return the error for the first cell of a row that cannot be written as JSON."""
    for column, value in row.items():
        try:
            _json(column, value)
        except BadCell as error:
            return error
    return BadCell(", ".join(row), "cannot be written as JSON; make it a text or a number")


def _json(column: str, value: Any) -> bytes:
    try:
        return orjson.dumps(value, plain, JSON)
    except TypeError as error:
        problem = f"cannot be written as JSON: {error}; make it a text or a number"
        if isinstance(value, str):
            problem = "is not UTF-8; convert the file to UTF-8"
        raise BadCell(column, problem) from None


def as_cells(row: Mapping[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """Return the cells of these columns of a row of Python values; a bad cell is a BadCell."""
    return {column: _cell(column, row.get(column)) for column in columns}


def _cell(column: str, value: Any) -> Any:
    try:
        return _json_value(column, value)
    except BadCell as error:
        return error
    except ValueError as error:
        return BadCell(column, f"cannot be written as JSON: {error}; make it a text")


def _json_value(column: str, value: Any) -> Any:
    """Return the JSON value of a value of Python, pandas or numpy; bytes stay bytes."""
    if value is None or type(value) in (str, bool, int):
        return value
    if type(value).__name__ in _MISSING:
        return None
    if hasattr(value, "dtype"):
        return _of_numpy(column, value)
    if isinstance(value, enum.Enum):
        return _json_value(column, value.value)
    if isinstance(value, Mapping):
        return _object(column, value)
    if isinstance(value, list | tuple):
        return [_json_value(column, one) for one in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if isinstance(value, bytes) else value_of(column, value)


def _object(column: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an object without pandas' missing values and NaN; None is kept."""
    members: dict[str, Any] = {}
    for key, one in value.items():
        name, inner = key_of(key), _json_value(column, one)
        if name in members:
            raise ValueError(f"an object has the key {name[:140]!r} twice")
        if inner is not None or one is None:
            members[name] = inner
    return members


def _of_numpy(column: str, value: Any) -> Any:
    """Return the JSON value of a number or array of numpy, or of a column of pandas."""
    if value.ndim:
        return [_json_value(column, one) for one in value]
    kind, text = value.dtype.kind, str(value)
    if text == "NaT":
        return None
    if kind == "M":
        return text
    if kind == "m":
        return duration_of(int(value.astype("timedelta64[ns]").astype("int64")))
    if kind == "f" and math.isfinite(value):
        return value_of(column, float(text))  # the shortest number for its number of bits
    return _json_value(column, value.item())
