"""Tables that tests write, and what a source makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from contract.errors import RequestRejected
from contract.openai.lines import parse_line
from producer.input.reader import RawChunk
from producer.input.source import Source
from producer.input.tables.kept import split_kept

SEED = "00" * 32


def chunks_of(source: Source, longest: int = 10**6) -> list[RawChunk]:
    return list(source.chunks(SEED, longest))


def requests_of(source: Source) -> list[dict[str, Any]]:
    lines = [line for chunk in chunks_of(source) for _, line in chunk.lines]
    return [orjson.loads(split_kept(line)[0]) for line in lines]


def errors_of(source: Source, longest: int = 10**6) -> dict[int, RequestRejected]:
    """Return the errors of the lines that are no requests, in the table's own terms."""
    found = {}
    for chunk in chunks_of(source, longest):
        for number, line in chunk.lines:
            request, _ = split_kept(line)
            try:
                parse_line(request)
            except RequestRejected as error:
                assert chunk.explain is not None
                found[number] = chunk.explain(number, request, error)
    return found


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> str:
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


def text_file(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)
