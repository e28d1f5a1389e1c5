"""Rows that become lines: what is wrong with one is told by row and column.

A row that no line can be made of becomes a line that no request can be, a JSON list of what is
wrong. So it has its number like any other, the digest covers it, and it gets an error result.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from contract.errors import RequestRejected
from producer.input.reader import Told


def bad_row(problem: str, column: str = "", custom_id: object = None) -> bytes:
    """Return the line of a row that is no request; `problem` ends with what to do about it."""
    own = custom_id if isinstance(custom_id, str) else None
    try:
        return orjson.dumps([problem, column, own]) + b"\n"
    except TypeError:  # it is not UTF-8 itself
        return orjson.dumps([problem, column, None]) + b"\n"


def told_by_row(what: str, columns: Mapping[str, str]) -> Told:
    """Return what tells errors of lines that were made from rows.

    `what` is what a row is called, `columns` names the column (or columns) of each field.
    """

    def told(number: int, line: bytes, error: RequestRejected) -> RequestRejected:
        if line.startswith(b"["):
            problem, column, custom_id = orjson.loads(line)
            where = f", column {column}" if column else ""
            return RequestRejected(
                f"{what} {number}{where}: {problem}", field=column or None, custom_id=custom_id
            )
        field = error.field or ""
        column = columns.get(_root(field), "")
        message = f"{what} {number}, {error.message}"
        if column and column == field:
            message = f"{what} {number}, column {error.message.removeprefix('field ')}"
        elif column:
            message = f"{what} {number}, column {column}, {error.message}"
        return RequestRejected(
            message, code=error.code, field=error.field, custom_id=error.custom_id
        )

    return told


def _root(field: str) -> str:
    """Return the name of the field of a request that an error is in."""
    return field.removeprefix("body.").partition(".")[0].partition("[")[0]
