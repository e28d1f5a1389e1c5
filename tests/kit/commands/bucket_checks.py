"""What holds of a bucket of any service, as runs and gateways use it. `url` is the bucket's."""

from __future__ import annotations

import io
import os
from pathlib import Path

import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.commands.support import queued, run_all, run_producer
from obstore.store import from_url

from contract.redis.batches import BatchStore
from gateway.file_store import FileStoreFailed, open_store
from producer.input.bucket import ObjectPlace, urls_under
from producer.input.files import ObjectFile, OutputUnwritable, check_object
from producer.input.reader import InputUnreadable

MIB = 2**20
#: More than two parts of an upload.
_SIZE = 20 * MIB + 7


def _write(url: str, data: bytes) -> None:
    with ObjectFile(url) as file:
        for at in range(0, len(data), MIB):
            file.write(data[at : at + MIB])


def check_objects(url: str) -> None:
    """Written in parts and read in ranges, an object is as it was; a failure leaves nothing."""
    name, data, store = f"{url}/dir/a", os.urandom(_SIZE), from_url(url)
    with pytest.raises(InputUnreadable, match="there is no such object"):
        ObjectPlace(name).size()
    check_object(name)
    _write(name, data)
    place = ObjectPlace(name)
    assert place.size() == _SIZE
    stream = place.open(in_order=True)
    assert io.BufferedReader(stream, MIB).read() == data
    assert place.read(8 * MIB - 1, 8 * MIB + 1) == data[8 * MIB - 1 : 8 * MIB + 1]
    obstore.put(store, "dir/b", b"as it was")
    assert list(urls_under(f"{url}/dir/")) == [name, f"{url}/dir/b"]
    with pytest.raises(ZeroDivisionError), ObjectFile(f"{url}/dir/b") as file:
        file.write(data)
        raise ZeroDivisionError
    assert bytes(obstore.get(store, "dir/b").bytes()) == b"as it was"
    before = place.fingerprint()
    _write(name, data[::-1])
    assert place.fingerprint() != before
    with pytest.raises(InputUnreadable, match="has changed while it was read"):
        place.read(0, 10)


def check_bucket_that_is_not_there(url: str, told: str) -> None:
    """It is named before anything runs, with the settings of its service."""
    with pytest.raises(OutputUnwritable, match=told):
        check_object(f"{url}-none/a")


def check_command(url: str, redis_url: str, store: BatchStore) -> None:
    """`submit` and `results` read a table there, and write one."""
    sink, bucket = pa.BufferOutputStream(), from_url(url)
    texts = [f"question {number}" for number in range(700)]
    pq.write_table(pa.table({"text": texts}), sink)
    obstore.put(bucket, "in/part-0.parquet", bytes(sink.getvalue()))
    args = ("submit", f"{url}/in/", "--map", "prompt=text", "--batch-id", "b1")
    done = run_producer(*args, redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert len(queued(store)) == 700
    run_all(store)
    for out in ("out.jsonl", "out.parquet"):
        done = run_producer("results", "b1", "-o", f"{url}/{out}", redis_url=redis_url)
        assert done.returncode == 0, done.stderr
    lines = bytes(obstore.get(bucket, "out.jsonl").bytes()).splitlines()
    table = pq.read_table(pa.BufferReader(bytes(obstore.get(bucket, "out.parquet").bytes())))
    ids = [orjson.loads(line)["custom_id"] for line in lines]
    assert len(ids) == 700
    assert table.column("custom_id").to_pylist() == ids


def check_store(url: str) -> None:
    """A gateway's files come out as they were, ranges too; what is not committed is not there."""
    store, data = open_store(f"{url}/some/prefix"), os.urandom(_SIZE)
    with store.write("file-a") as writer:
        writer.write(data)
        assert writer.commit() == _SIZE
    with store.write("file-b") as writer:
        writer.write(data)
    assert (store.size("file-a"), store.size("file-b")) == (_SIZE, None)
    assert b"".join(store.read("file-a")) == data
    assert b"".join(store.read("file-a", 5, 9)) == data[5:9]
    with store.local("file-a") as path:
        assert Path(path).read_bytes() == data
    store.delete("file-a")
    store.delete("file-a")  # it is gone already
    assert store.size("file-a") is None
    with pytest.raises(FileStoreFailed, match="WARMQ_GATEWAY_STORE"):
        open_store(f"{url}-none")
