"""What a table's cell is in a request: a text in a template, or a JSON value."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from collections.abc import Mapping
from typing import Any

import orjson

#: Whole floats below it are each one integer.
_EXACT = 2**53
#: How cells are written. orjson itself writes 00:00:14.010000 as 00:00:14.10000.
JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATETIME
_TIMES = (dt.datetime, dt.date, dt.time)


class BadCell(Exception):
    """A cell that nothing can be made of; `problem` ends with what to do about it."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(problem)
        self.column = column
        self.problem = problem


def empty(column: str) -> BadCell:
    """Return the error for a cell without a value where one is needed."""
    return BadCell(column, "is empty; fill it, or leave the row out")


def text_of(column: str, value: Any) -> str:
    """Return a cell as text.

    Raises:
        BadCell: it has no value, or bytes.
    """
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
    return str(value)


def value_of(column: str, value: Any) -> Any:
    """Return a cell as a value that can be written as JSON: None for NaN, an int for 16.0.

    Raises:
        BadCell: it has bytes or an infinite number, or could not be read.
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
        raise _bytes(column)
    return value


def list_or_object(value: Any) -> Any:
    """Return the list or object that a text holds as JSON; the text itself if it holds none."""
    found = parsed(value)
    return found if isinstance(found, list | dict) else value


def parsed(value: Any) -> Any:
    """Return the JSON value that a text holds; the text itself if it holds none."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def plain(value: object) -> Any:
    """Return what JSON has for a value of a table that it does not know."""
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if isinstance(value, _TIMES):
        return value.isoformat()
    raise TypeError(f"type {type(value).__name__} is not a JSON value")


def not_json(row: Mapping[str, Any]) -> BadCell:
    """Return the error for the first of a row's cells that JSON does not have."""
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


def _bytes(column: str) -> BadCell:
    return BadCell(column, "holds bytes, and a request has texts; decode the column first")
