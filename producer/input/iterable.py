"""Requests of a Python program as a source: each is written as a line when its turn comes.

What is wrong with a row is told by row and column. A row that no line can be made of becomes a line
that no request can be, a JSON list of what is wrong. So it has its number like any other, the
digest covers it, and it gets an error result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import orjson

from contract.errors import RequestRejected
from producer.input.reader import ExplainError, RawChunk, chunks


def bad_row(problem: str, column: str = "", custom_id: object = None) -> bytes:
    """Return the line of a row that is no request; `problem` ends with what to do about it."""
    own = custom_id if isinstance(custom_id, str) else None
    try:
        return orjson.dumps([problem, column, own]) + b"\n"
    except TypeError:  # it is not UTF-8 itself
        return orjson.dumps([problem, column, None]) + b"\n"


def explain_by_row(what: str, columns: Mapping[str, str]) -> ExplainError:
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


#: Makes the line of one row.
ToLine = Callable[[Any], bytes]
#: As `json` and the SDKs write it: {5: -100} is {"5": -100}.
_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
_EXAMPLE = '{"prompt": "..."} or {"messages": [...]}'


class LineStream:
    """Lines that are made one by one, as a stream to read from."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self._line, self._at = b"", 0

    def readline(self, limit: int, /) -> bytes:
        """Return the next line, or as much of it as `limit`; b'' at the end."""
        if self._at >= len(self._line):
            self._line, self._at = next(self._lines, b""), 0
        start, self._at = self._at, self._at + limit
        return self._line[start : self._at]  # the line itself, where that is all of it


def line_of(request: Any) -> bytes:
    """Return the line of a request, an object as a file's line has it."""
    if not isinstance(request, Mapping):
        return bad_row(f"is of type {type(request).__name__}; give a dict such as {_EXAMPLE}")
    try:
        return orjson.dumps(request if isinstance(request, dict) else dict(request), option=_JSON)
    except TypeError as error:
        where = next((f"field {name}: " for name in request if not _is_json(request[name])), "")
        problem = f"{where}cannot be written as JSON: {error}; give texts, numbers, lists and dicts"
        return bad_row(problem, custom_id=request.get("custom_id"))


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value, option=_JSON)
    except TypeError:
        return False
    return True


class IterableSource:
    """What a program gives: any iterable. An iterator is read once, and so is what `once` says.

    `to_line` makes a line of each, `what` is what one is called, `columns` as in `explain_by_row`.
    """

    def __init__(
        self,
        items: Iterable[Any],
        to_line: ToLine = line_of,
        *,
        name: str = "a Python iterable",
        what: str = "request",
        columns: Mapping[str, str] | None = None,
        once: bool = False,
    ) -> None:
        self.name = name
        self._items = items
        self._to_line = to_line
        self._what = what
        self._columns = columns or {}
        #: The fields that columns give.
        self.fields = self._columns.keys()
        #: Whether it can be iterated again: a list can, a generator cannot.
        self.repeatable = not (once or isinstance(items, Iterator))
        #: How many were read.
        self.position = 0

    @property
    def size(self) -> int | None:
        """How many there are, where that is known."""
        sized = self.repeatable and isinstance(self._items, Sized)
        return len(self._items) if sized else None  # type: ignore[arg-type]

    def again(self) -> IterableSource:
        """Return it from the start."""
        return IterableSource(
            self._items, self._to_line, name=self.name, what=self._what, columns=self._columns
        )

    def fingerprint(self) -> str:
        """Return '': it is not known before it is read."""
        return ""

    def chunks(self, seed: str | None, max_line_bytes: int) -> Iterator[RawChunk]:
        """Yield its lines, as `reader.chunks` does. Raises what iterating raises."""
        told = explain_by_row(self._what, self._columns)
        return chunks(LineStream(self._lines()), seed, max_line_bytes, told)

    def _lines(self) -> Iterator[bytes]:
        for item in self._items:
            self.position += 1
            yield self._to_line(item)

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""
