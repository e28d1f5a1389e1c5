"""Writes results as a parquet table, with a row for each request.

Its functions find the text, finish reason and tokens in the answer of any endpoint.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Self, TypeVar

import orjson

from contract.results import ResultLine
from producer.input.tables.arrow import pyarrow

T = TypeVar("T")
#: Rows or bytes after which a row group is written; until then it is in Arrow's memory.
_GROUP_ROWS, _GROUP_BYTES = 50_000, 8 * 2**20
#: Rows or bytes after which Python objects are converted to Arrow, which takes less memory.
_PIECE_ROWS, _PIECE_BYTES = 500, 2**20
#: Bound of token counts; larger ones are ignored, because a column has 64 bits.
_MOST_TOKENS = 2**53
#: Columns whose texts repeat, and are stored as dictionaries.
_REPEATED = ["finish_reason", "error_code"]
#: Columns of integers; all other columns are texts.
_NUMBERS = ("line", "prompt_tokens", "completion_tokens")
#: All columns. `text` is the first choice's text, `response` the engine's answer as JSON.
_COLUMNS = (
    "custom_id", "line", "text", "finish_reason", "prompt_tokens", "completion_tokens",
    "error_code", "error_message", "response", "id",
)  # fmt: skip


def row_of(line: ResultLine) -> dict[str, Any]:
    """Return the row of a result."""
    result = orjson.loads(line.json)
    row = dict.fromkeys(_COLUMNS) | {"id": result["id"], "custom_id": result["custom_id"]}
    if error := result["error"]:
        return row | {
            "line": error["line"],
            "error_code": error.get("code"),
            "error_message": error.get("message"),
        }
    body = result["response"]["body"]
    row |= {"line": result["warmq"]["line"], "response": orjson.dumps(body).decode()}
    if isinstance(body, dict):
        row["text"], row["finish_reason"] = text_of(body), finish_reason_of(body)
        row["prompt_tokens"], row["completion_tokens"] = tokens_of(body)
    return row


class _Sink(io.RawIOBase):
    """The file that pyarrow writes to; passes bytes to a function."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._position = 0

    def drop(self) -> None:
        """Ignore further bytes: pyarrow writes a footer even to an abandoned file."""
        self._write = lambda data: None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._write(bytes(data))
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position


class ParquetLines:
    """Writes results as parquet, a row group at a time; `write` takes the bytes."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._arrow, parquet = pyarrow("a table of results"), pyarrow("results", "parquet")
        texts, numbers = self._arrow.string(), self._arrow.int64()
        self._schema = self._arrow.schema(
            [(name, numbers if name in _NUMBERS else texts) for name in _COLUMNS]
        )
        self._sink = _Sink(write)
        file = self._arrow.PythonFile(self._sink, mode="w")
        self._writer = parquet.ParquetWriter(
            file, self._schema, compression="zstd", use_dictionary=_REPEATED, write_statistics=False
        )
        self._rows: list[dict[str, Any]] = []
        self._rows_size = 0
        self._batches: list[Any] = []
        self._open = True

    @staticmethod
    def check(name: str) -> None:
        """Raise ExtraMissing if pyarrow is not installed."""
        pyarrow(name, "parquet")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._sink.drop()

    def add(self, line: ResultLine) -> None:
        """Append a result."""
        self._rows.append(row_of(line))
        self._rows_size += len(line.json)
        if len(self._rows) >= _PIECE_ROWS or self._rows_size >= _PIECE_BYTES:
            self._convert_rows()
            rows = sum(batch.num_rows for batch in self._batches)
            if rows >= _GROUP_ROWS or sum(b.nbytes for b in self._batches) >= _GROUP_BYTES:
                self._write_group()

    def _convert_rows(self) -> None:
        rows, self._rows, self._rows_size = self._rows, [], 0
        self._batches.append(self._arrow.RecordBatch.from_pylist(rows, schema=self._schema))

    def _write_group(self) -> None:
        batches, self._batches = self._batches, []
        table = self._arrow.Table.from_batches(batches, schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def finish(self) -> None:
        """Write the remaining rows and the footer."""
        if self._open:
            self._convert_rows()
            self._write_group()
            self._open = False
            self._writer.close()


# A result may be of another program, so a value of an unexpected type counts as missing.


def text_of(body: dict[str, Any]) -> str | None:
    """Return the text of an answer's first choice; None without text, for example an embedding."""
    if body.get("object") == "response":
        parts = [part for item in _objects(body, "output") for part in _objects(item, "content")]
        return _joined(parts, "output_text")
    if body.get("type") == "message":
        return _joined(_objects(body, "content"), "text")
    choice = _first_choice(body)
    text = (_get(choice, "message", dict) or {}).get("content", choice.get("text"))
    return text if isinstance(text, str) else None


def finish_reason_of(body: dict[str, Any]) -> str | None:
    """Return the reason why an answer ended, in its endpoint's own words."""
    if body.get("object") == "response":
        incomplete = _get(body, "incomplete_details", dict) or {}
        return _get(incomplete, "reason", str) or _get(body, "status", str)
    return _get(_first_choice(body), "finish_reason", str) or _get(body, "stop_reason", str)


def tokens_of(body: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer. Anthropic counts cached prompt tokens separately."""
    usage = _get(body, "usage", dict) or {}
    prompt, completion = _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
    if prompt is None and _number(usage, "input_tokens") is not None:
        cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
        prompt = sum(_number(usage, name) or 0 for name in ("input_tokens", *cached))
    return prompt, _number(usage, "output_tokens") if completion is None else completion


def _get(of: dict[str, Any], name: str, kind: type[T]) -> T | None:
    value = of.get(name)
    return value if isinstance(value, kind) else None


def _number(of: dict[str, Any], name: str) -> int | None:
    value = of.get(name)
    return value if type(value) is int and abs(value) < _MOST_TOKENS else None


def _objects(of: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [value for value in _get(of, name, list) or [] if isinstance(value, dict)]


def _first_choice(body: dict[str, Any]) -> dict[str, Any]:
    return next(iter(_objects(body, "choices")), {})


def _joined(parts: list[dict[str, Any]], kind: str) -> str | None:
    texts = [_get(part, "text", str) for part in parts if part.get("type") == kind]
    return "".join(filter(None, texts)) or None
