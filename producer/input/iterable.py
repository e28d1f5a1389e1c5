"""Reads requests from Python iterables as lines; errors name the row and column.

A row that cannot become a request becomes a line with a JSON list [problem, column, custom_id].
Thereby the row keeps its number, the digest covers it, and it gets an error result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice
from typing import Any

import orjson

from contract.errors import RequestRejected
from producer.input.reader import ExplainError, LineStream, RawChunk, chunks

#: Function that returns the line of one row.
ToLine = Callable[[Any], bytes]
#: Options of orjson, to write {5: -100} as {"5": -100}, as `json` and the SDKs do.
JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
_EXAMPLE = '{"prompt": "..."} or {"messages": [...]}'


def bad_row(problem: str, column: str = "", custom_id: object = None) -> bytes:
    """Return the line of a bad row; `problem` ends with the remedy."""
    own = custom_id if isinstance(custom_id, str) else None
    try:
        return orjson.dumps([problem, column, own]) + b"\n"
    except TypeError:  # the custom_id is not UTF-8
        return orjson.dumps([problem, column, None]) + b"\n"


def explain_by_row(what: str, columns: Mapping[str, str]) -> ExplainError:
    """Return a function that rewrites errors of lines as errors of rows.

    `what` is the word for a row in errors; `columns` has the column (or columns) of each field.
    """

    def explain(number: int, line: bytes, error: RequestRejected) -> RequestRejected:
        if line.startswith(b"["):
            problem, column, custom_id = orjson.loads(line)
            where = f", column {column}" if column else ""
            return RequestRejected(
                f"{what} {number}{where}: {problem}", field=column or None, custom_id=custom_id
            )
        field = error.field or ""
        root = field.removeprefix("body.").partition(".")[0].partition("[")[0]
        column = columns.get(root, "")
        message = f"{what} {number}, {error.message}"
        if column and column == field:
            message = f"{what} {number}, column {error.message.removeprefix('field ')}"
        elif column:
            message = f"{what} {number}, column {column}, {error.message}"
        return RequestRejected(
            message, code=error.code, field=error.field, custom_id=error.custom_id
        )

    return explain


def line_of(request: Any) -> bytes:
    """Return the line of a request, a dict with the fields of a line."""
    if not isinstance(request, Mapping):
        return bad_row(f"must be a dict such as {_EXAMPLE}, not {type(request).__name__}")
    try:
        return orjson.dumps(request if isinstance(request, dict) else dict(request), option=JSON)
    except TypeError as error:
        where = next((f"field {name}: " for name in request if not _is_json(request[name])), "")
        problem = f"{where}cannot be written as JSON: {error}; give texts, numbers, lists and dicts"
        return bad_row(problem, custom_id=request.get("custom_id"))


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value, option=JSON)
    except TypeError:
        return False
    return True


def columns_of(rows: Iterable[Any]) -> tuple[list[str] | None, bool, Iterable[Any]]:
    """Return the columns of rows, whether only the first row was read for them, and the rows."""
    names = getattr(rows, "column_names", None)  # of a data set; None for a streamed data set
    if isinstance(names, list):
        return names, False, rows
    if isinstance(rows, list | tuple):
        dicts = (row for row in rows if isinstance(row, Mapping))
        return list(dict.fromkeys(key for row in dicts for key in row)) or None, False, rows
    first = list(islice(iterator := iter(rows), 1))
    columns = list(first[0]) if first and isinstance(first[0], Mapping) else None
    return columns, True, chain(first, iterator) if iterator is rows else rows


class IterableSource:
    """A source over any iterable; an iterator, or an iterable with `one_pass`, is read once.

    `to_line` returns the line of a row; `what` and `columns` are for `explain_by_row`. `unused` and
    `output_columns` are those of a TableSource.
    """

    def __init__(
        self,
        rows: Iterable[Any],
        to_line: ToLine = line_of,
        *,
        name: str = "a Python iterable",
        what: str = "request",
        columns: Mapping[str, str] | None = None,
        one_pass: bool = False,
        unused: Sequence[str] = (),
        output_columns: str = "",
    ) -> None:
        self._rows, self._to_line = rows, to_line
        self.name, self._what = name, what
        self._columns = columns or {}
        self.unused, self.output_columns = unused, output_columns
        #: Fields that come from columns.
        self.fields = self._columns.keys()
        #: Whether `reopen` can read the rows again.
        self.repeatable = not (one_pass or isinstance(rows, Iterator))
        #: Rows read so far.
        self.position = 0

    @property
    def size(self) -> int | None:
        """Number of rows; None if unknown. It is read on access only: some `__len__` raise."""
        sized = self.repeatable and isinstance(self._rows, Sized)
        return len(self._rows) if sized else None  # type: ignore[arg-type]

    def reopen(self) -> IterableSource:
        """Return the source from its start."""
        return IterableSource(
            self._rows, self._to_line, name=self.name, what=self._what, columns=self._columns,
            output_columns=self.output_columns,
        )  # fmt: skip

    def fingerprint(self) -> str:
        """Return '': the content is unknown before it is read."""
        return ""

    def chunks(self, seed: str | None, max_line_bytes: int) -> Iterator[RawChunk]:
        """Yield the chunks of `reader.chunks`; errors of iterating pass through."""
        explain = explain_by_row(self._what, self._columns)
        return chunks(LineStream(self._lines()), seed, max_line_bytes, explain)

    def _lines(self) -> Iterator[bytes]:
        for row in self._rows:
            self.position += 1
            yield self._to_line(row)

    def close(self) -> None:
        """Do nothing: the rows belong to the caller."""
