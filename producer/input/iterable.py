"""Reads requests from Python iterables as lines; errors name the row and column.

A row that cannot become a request becomes a line with a JSON list [problem, column, custom_id],
and the error's code if it is not `invalid_request`. Thereby the row keeps its number, the digest
covers it, and it gets an error result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice
from typing import Any

import orjson

from contract.errors import RequestRejected
from contract.openai.lines import MAX_CUSTOM_ID
from producer.input.reader import (
    LONGEST_LINE,
    ExplainError,
    LineStream,
    RawChunk,
    chunks,
    longer_than,
)

#: Function that returns the line of one row.
ToLine = Callable[[Any], bytes]
#: Options of orjson, to write {5: -100} as {"5": -100}, as `json` and the SDKs do.
JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
#: More than a request and its kept cells have, so that the reader skips no row.
_NO_LIMIT = 4 * LONGEST_LINE
_EXAMPLE = '{"prompt": "..."} or {"messages": [...]}'


def bad_row(problem: str, column: str = "", custom_id: object = None, code: str = "") -> bytes:
    """Return the line of a bad row; `problem` ends with the remedy."""
    valid = isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_CUSTOM_ID
    more = [code] if code else []
    try:
        return orjson.dumps([problem, column, custom_id if valid else None, *more]) + b"\n"
    except TypeError:  # the custom_id is not UTF-8
        return orjson.dumps([problem, column, None, *more]) + b"\n"


def row_chunks(
    rows: Iterable[bytes], seed: str | None, longest: int, explain: ExplainError
) -> Iterator[RawChunk]:
    """Yield the chunks of rows' lines; a row longer than `longest` bytes becomes a bad row."""
    lines = LineStream(row if len(row) <= longest else _bounded(row, longest) for row in rows)
    return chunks(lines, seed, _NO_LIMIT, explain)


def _bounded(line: bytes, longest: int) -> bytes:
    """Return a row's line, or that of its error if its request or kept cells are too long.

    Each has the limit of its own. The longest kept cells are left out until the rest fits in.
    """
    request, _, kept = line.partition(b"\n")
    size, whole = len(request), len(kept)
    kept, left_out = _bounded_cells(kept, longest)
    if size <= longest and not left_out:
        return line
    value, names = orjson.loads(request), ", ".join(left_out)
    if isinstance(value, list):  # a bad row already
        problem, column, custom_id, *code = value
    else:
        problem, column, custom_id, code = "", "", value.get("custom_id"), ["line_too_long"]
    if isinstance(value, dict) and size <= longest:
        problem = f"cannot be kept, the kept cells are {longer_than(longest, whole)}"
        return bad_row(problem, names, custom_id, *code) + kept
    problem = problem or longer_than(longest, size)
    problem += f"; too long to be kept: {names}" if names else ""
    return bad_row(problem, column, custom_id, *code) + kept


def _bounded_cells(kept: bytes, longest: int) -> tuple[bytes, list[str]]:
    """Return the JSON of the kept cells, and the names of those that it leaves out."""
    left, left_out = len(kept), list[str]()
    if left <= longest:
        return kept, left_out
    cells = orjson.loads(kept)
    sizes = {name: len(orjson.dumps(cell)) for name, cell in cells.items()}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if left > longest:
            left += len(b"null") - sizes[name]
            cells[name] = None
            left_out.append(name)
    return orjson.dumps(cells, option=orjson.OPT_APPEND_NEWLINE), left_out


def explain_by_row(what: str, columns: Mapping[str, str]) -> ExplainError:
    """Return a function that rewrites errors of lines as errors of rows.

    `what` is the word for a row in errors; `columns` has the column (or columns) of each field.
    """

    def explain(number: int, line: bytes, error: RequestRejected) -> RequestRejected:
        if line.startswith(b"["):
            problem, column, custom_id, *code = orjson.loads(line)
            where = f", column {column}" if column else ""
            return RequestRejected(
                f"{what} {number}{where}: {problem}",
                code=code[0] if code else None,
                field=column or None,
                custom_id=custom_id,
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
        """Yield the chunks of `row_chunks`; errors of iterating pass through."""
        explain = explain_by_row(self._what, self._columns)
        return row_chunks(self._lines(), seed, max_line_bytes, explain)

    def _lines(self) -> Iterator[bytes]:
        for row in self._rows:
            self.position += 1
            yield self._to_line(row)

    def close(self) -> None:
        """Do nothing: the rows belong to the caller."""
