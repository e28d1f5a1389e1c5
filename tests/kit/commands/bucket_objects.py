"""Objects of requests and of results in a bucket of tests."""

from __future__ import annotations

from typing import Any

import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from kit.commands.support import (
    queued,
)

from contract.redis.batches import BatchStore


def put(bucket: Any, name: str, data: bytes) -> str:
    obstore.put(bucket, name, data)
    return f"s3://warmq/{name}"


def read(bucket: Any, name: str) -> bytes:
    return bytes(obstore.get(bucket, name).bytes())


def request_lines(count: int) -> bytes:
    return b"".join(
        orjson.dumps({"custom_id": f"r{n}", "prompt": f"question {n}"}) + b"\n"
        for n in range(count)
    )


def parquet_bytes(count: int) -> bytes:
    sink = pa.BufferOutputStream()
    ids = [f"r{n}" for n in range(count)]
    pq.write_table(pa.table({"id": ids, "text": [f"question {n}" for n in range(count)]}), sink)
    return bytes(sink.getvalue())


def custom_ids(store: BatchStore) -> list[str]:
    return [message["headers"]["warmq"]["custom_id"] for message in queued(store)]


def rows(data: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(pa.BufferReader(data)).to_pylist()
    return found
