"""Rows of a Python program, as `df.to_dict("records")` gives them.

A value of pandas or numpy becomes what the same value of a table becomes.
"""

from __future__ import annotations

import datetime as dt
import enum
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from producer.input.tables.cells import BadCell, Duration, key_of, value_of

#: Types of what is missing; nothing else can be asked of pandas' NA.
_MISSING = ("NAType", "NaTType")


def as_cells(row: Mapping[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """Return the cells of some columns; one that JSON cannot have is a BadCell."""
    return {column: _cell(column, row.get(column)) for column in columns}


def _cell(column: str, value: Any) -> Any:
    try:
        return _plain(column, value)
    except BadCell as error:
        return error
    except ValueError as error:
        return BadCell(column, f"cannot be written as JSON: {error}; make it a text")


def _plain(column: str, value: Any) -> Any:
    if value is None or type(value) in (str, bool, int):
        return value
    if type(value).__name__ in _MISSING:
        return None
    if hasattr(value, "dtype"):
        return _of_numpy(column, value)
    if isinstance(value, enum.Enum):
        return _plain(column, value.value)
    if isinstance(value, Mapping):
        return _object(column, value)
    if isinstance(value, list | tuple):
        return [_plain(column, one) for one in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if isinstance(value, bytes) else value_of(column, value)


def _object(column: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an object; what is missing, and not None, is left out, as of a struct."""
    found: dict[str, Any] = {}
    for key, one in value.items():
        name, inner = key_of(key), _plain(column, one)
        if name in found:
            raise ValueError(f"the key {name[:140]!r} stands twice")
        if inner is not None or one is None:
            found[name] = inner
    return found


def _of_numpy(column: str, value: Any) -> Any:
    """Return what a number, an array or a column of pandas holds."""
    if value.ndim:
        return [_plain(column, one) for one in value]
    kind, text = value.dtype.kind, str(value)
    if text == "NaT":
        return None
    if kind == "M":
        return text
    if kind == "m":
        nanoseconds = int(value.astype("timedelta64[ns]").astype("int64"))
        whole, rest = divmod(nanoseconds, 1000)
        return Duration(nanoseconds) if rest else dt.timedelta(microseconds=whole)
    if kind == "f" and math.isfinite(value):
        return value_of(column, float(text))  # the shortest number of its own width
    return _plain(column, value.item())
