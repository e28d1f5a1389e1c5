"""Reads data frames and tables through Arrow, and Hugging Face data sets, as sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from producer.input.iterable import IterableSource, ToLine
from producer.input.options import BadOption
from producer.input.reader import InputUnreadable
from producer.input.tables.arrow import pieces, pyarrow, rows_of
from producer.input.tables.mapping import RowMapping
from producer.input.tables.output_types import InputColumns

#: Prefix of the columns in which pandas exports an index, unless the index is a plain numbering.
_INDEX = "__index_level_"


def is_frame(value: object) -> bool:
    """Whether an object exports an Arrow stream, as frames of pandas and polars do."""
    return hasattr(value, "__arrow_c_stream__")


def is_series(value: object) -> bool:
    """Whether an object is one column, as series of pandas and polars are."""
    return hasattr(value, "to_frame") and hasattr(value, "name") and not hasattr(value, "columns")


def series_frame(series: Any, pairs: Mapping[str, str]) -> tuple[Any, Mapping[str, str]]:
    """Return a series as a frame of one column, and the mapping of its rows.

    Without `pairs`, texts are prompts, and lists are messages. The dicts of a series are requests;
    such a series is returned as a list.
    """
    # A missing value of pandas is a float, NaN.
    first = next((v for v in series if v is not None and not isinstance(v, float)), "")
    if isinstance(first, Mapping):
        return list(series), pairs
    name = str(series.name or "prompt")
    chats = isinstance(first, Iterable) and not isinstance(first, str)
    return series.to_frame(name), pairs or {"messages" if chats else "prompt": name}


def frame_source(frame: Any, pairs: Mapping[str, str], keep: Sequence[str] = ()) -> IterableSource:
    """Return a source over a frame. Raises ExtraMissing, and BadOption for a bad mapping."""
    rows = _Rows(frame)
    mapping = RowMapping(pairs, rows.columns, keep)
    rows.wanted = mapping.wanted
    return IterableSource(
        rows, mapping.line, name=rows.name, what="row", columns=mapping.columns,
        one_pass=not hasattr(frame, "__len__"), unused=mapping.unused,
        output_columns=InputColumns.text_of(mapping.kept.names, mapping.custom_id, rows.schema),
    )  # fmt: skip


class _Rows:
    """Iterates over the rows of a frame, each a dict of the wanted columns."""

    def __init__(self, frame: Any) -> None:
        self.name = f"a {type(frame).__name__}"
        self._frame = frame
        self._arrow = pyarrow(self.name)
        self._errors = (self._arrow.ArrowException, OverflowError, TypeError, ValueError)
        self._first: Any = self._open_stream()
        self.schema = self._first.schema
        self.columns = [n for n in self.schema.names if not n.startswith(_INDEX)]
        self.wanted: list[str] = self.columns

    def _open_stream(self) -> Any:
        try:
            return self._arrow.RecordBatchReader.from_stream(self._frame)
        except self._errors as error:
            text = str(error).partition("\n")[0]
            raise BadOption(
                f"requests: {self.name} is not accepted: {text}; give a data frame with named "
                "columns of one type each"
            ) from None

    def __len__(self) -> int:
        return len(self._frame)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        stream, self._first = self._first, None
        stream, row = self._open_stream() if stream is None else stream, 0
        while (batch := self._next(stream, row)) is not None:
            for piece in pieces(batch, self.wanted):
                yield from rows_of(piece)
            row += batch.num_rows

    def _next(self, stream: Any, row: int) -> Any:
        """Return the next record batch, None at the end; `row` is the number of rows read."""
        try:
            return next(stream, None)
        except self._errors as error:
            text = str(error).partition("\n")[0]
            raise InputUnreadable(f"{self.name}, after row {row}: {text}; fix its rows") from None


def is_data_set(value: object) -> bool:
    """Whether an object is a Hugging Face data set, in memory or streamed."""
    return hasattr(value, "features") and hasattr(value, "column_names")


def unpadded(data_set: Any, to_line: ToLine) -> ToLine:
    """Return a `to_line` that first removes keys without a value, at any depth.

    Each struct of a data set has the keys of all rows; keys that a row does not have are null. The
    nulls of a JSON column are kept.
    """
    features = data_set.features

    def line_of_row(row: Any) -> bytes:
        return to_line(_without_nulls(row, features) if isinstance(row, dict) else row)

    return line_of_row


def _without_nulls(value: Any, feature: Any) -> Any:
    """Remove the nulls that pad structs; without known features, all nulls of objects."""
    if isinstance(value, dict) and (feature is None or isinstance(feature, Mapping)):
        inner = feature or {}
        return {k: _without_nulls(v, inner.get(k)) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        kind = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        if feature is None or kind is not None:
            return [_without_nulls(one, kind) for one in value]
    return value
