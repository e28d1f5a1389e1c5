"""Results as a parquet table: a row for each request, with its answer's text in a column.

And what an answer says, whichever endpoint gave it: its text, why it ended, its tokens.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import orjson

from contract.results import ResultLine
from producer.input.tables.arrow import pyarrow

#: A row group ends after so many rows or bytes of Arrow's memory, where it is until then.
_ROWS, _BYTES = 50_000, 8 * 2**20
#: Rows that are Python's objects at a time, which take several times as much; or so many bytes.
_PIECE, _PIECE_BYTES = 500, 2**20
#: Tokens that nobody has; a column takes less than 2**63.
_MOST = 2**53
#: Of other columns no two texts are alike.
_REPEATED = ["finish_reason", "error_code"]
#: The columns: `text` is that of the first choice, `response` the engine's answer as JSON.
_NUMBERS = ("line", "prompt_tokens", "completion_tokens")
_ORDER = (
    "custom_id", "line", "text", "finish_reason", "prompt_tokens", "completion_tokens",
    "error_code", "error_message", "response", "id",
)  # fmt: skip


def row_of(line: ResultLine) -> dict[str, Any]:
    """Return the row of a result."""
    found = orjson.loads(line.json)
    row = dict.fromkeys(_ORDER) | {"id": found["id"], "custom_id": found["custom_id"]}
    if error := found["error"]:
        return row | {
            "line": error["line"],
            "error_code": error.get("code"),
            "error_message": error.get("message"),
        }
    body = found["response"]["body"]
    row |= {"line": found["warmq"]["line"], "response": orjson.dumps(body).decode()}
    if isinstance(body, dict):
        row |= _answer(body)
    return row


def _answer(body: dict[str, Any]) -> dict[str, Any]:
    """Return what has a column of its own in a response."""
    asked, written = tokens_of(body)
    return {
        "text": text_of(body),
        "finish_reason": finish_reason_of(body),
        "prompt_tokens": asked,
        "completion_tokens": written,
    }


class _Sink(io.RawIOBase):
    """What pyarrow writes to. What takes the bytes is closed by whoever has opened it."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._at = 0

    def drop(self) -> None:
        """Pass nothing on any more: pyarrow writes an end even to what is given up."""
        self._write = lambda data: None

    def writable(self) -> bool:
        """Say so to pyarrow."""
        return True

    def write(self, data: Any) -> int:
        """Pass bytes on; return how many."""
        self._write(bytes(data))
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._at


class ParquetLines:
    """Writes results into a parquet file, a row group at a time; `write` takes its bytes.

    Raises:
        ExtraMissing: pyarrow is not installed.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._arrow, parquet = pyarrow("a table of results"), pyarrow("results", "parquet")
        texts, numbers = self._arrow.string(), self._arrow.int64()
        self._schema = self._arrow.schema(
            [(name, numbers if name in _NUMBERS else texts) for name in _ORDER]
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
        """Raise ExtraMissing where the table of that name could not be written."""
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
        if len(self._rows) >= _PIECE or self._rows_size >= _PIECE_BYTES:
            self._gather()
            kept = self._batches
            if sum(b.num_rows for b in kept) >= _ROWS or sum(b.nbytes for b in kept) >= _BYTES:
                self._put()

    def _gather(self) -> None:
        rows, self._rows, self._rows_size = self._rows, [], 0
        self._batches.append(self._arrow.RecordBatch.from_pylist(rows, schema=self._schema))

    def _put(self) -> None:
        batches, self._batches = self._batches, []
        table = self._arrow.Table.from_batches(batches, schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def finish(self) -> None:
        """Write what is left, and the end."""
        if self._open:
            self._gather()
            self._put()
            self._open = False
            self._writer.close()


Body = Mapping[str, Any]


def text_of(body: Body) -> str | None:
    """Return the text of an answer's first choice, of a response or of a message; None if it has
    none, as embeddings have."""
    if body.get("object") == "response":
        said = [part for item in _objects(body, "output") for part in _objects(item, "content")]
        return _joined(said, "output_text")
    if body.get("type") == "message":
        return _joined(_objects(body, "content"), "text")
    choice = _choice(body)
    return _text(_object(choice, "message").get("content", choice.get("text")))


def finish_reason_of(body: Body) -> str | None:
    """Return why an answer ended, in its endpoint's own words."""
    if body.get("object") == "response":
        cut = _object(body, "incomplete_details")
        return _text(cut.get("reason")) or _text(body.get("status"))
    return _text(_choice(body).get("finish_reason")) or _text(body.get("stop_reason"))


def tokens_of(body: Body) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer. Anthropic counts those of the cache apart."""
    usage = _object(body, "usage")
    asked, written = _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
    if asked is None and _number(usage, "input_tokens") is not None:
        cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
        asked = sum(_number(usage, name) or 0 for name in ("input_tokens", *cached))
    return asked, _number(usage, "output_tokens") if written is None else written


# A result may be another program's: whatever has another type than it should is not there.


def _choice(body: Body) -> Body:
    return next(iter(_objects(body, "choices")), {})


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(of: Body, name: str) -> int | None:
    found = of.get(name)
    return found if type(found) is int and abs(found) < _MOST else None


def _object(of: Body, name: str) -> Body:
    found = of.get(name)
    return found if isinstance(found, Mapping) else {}


def _objects(of: Body, name: str) -> list[Body]:
    found = of.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _joined(parts: Iterable[Body], kind: str) -> str | None:
    texts = [_text(part.get("text")) for part in parts if part.get("type") == kind]
    return "".join(filter(None, texts)) or None
