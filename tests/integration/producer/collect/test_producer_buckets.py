"""`submit` and `results` with buckets: objects are streamed, and appear whole or never."""

from __future__ import annotations

import functools
import gc
import http.server
import os
import subprocess
import sys
import threading
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import orjson
import pytest
from kit.commands.bucket_objects import custom_ids, parquet_bytes, put, read, request_lines, rows
from kit.commands.support import (
    producer_command,
    producer_env,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.servers.s3 import unfinished

from contract.errors import ExtraMissing
from contract.redis.batches import BatchStore
from contract.results import ResultLine
from demo.stack import eventually
from producer import Client
from producer.collect.outputs import ResultFile, check_output
from producer.input.reader import InputUnreadable
from producer.input.source import open_source
from producer.input.tables.kept import split_kept

pytestmark = pytest.mark.usefixtures("bucket_environment")
MAP = ("--map", "prompt={text}", "--map", "custom_id=id")


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_an_object_is_submitted_as_the_file_is_and_its_results_go_to_a_bucket(
    redis_url: str, store: BatchStore, bucket: Any, tmp_path: Path, ending: str
):
    import gzip

    data = parquet_bytes(700) if ending == "parquet" else request_lines(700)
    name = put(bucket, f"in/a.{ending}", gzip.compress(data) if ending.endswith("gz") else data)
    mapped = MAP if ending == "parquet" else ()
    done = run_producer("submit", name, *mapped, "--batch-id", "b1", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert custom_ids(store) == [f"r{n}" for n in range(700)]
    run_all(store)
    local = tmp_path / "out.jsonl"
    for out in (local, "s3://warmq/out/a.jsonl", "s3://warmq/out/a.parquet"):
        done = run_producer("results", "b1", "-o", out, redis_url=redis_url)
        assert done.returncode == 0, done.stderr
    assert read(bucket, "out/a.jsonl") == local.read_bytes()
    table = rows(read(bucket, "out/a.parquet"))
    lines = [orjson.loads(line) for line in local.read_bytes().splitlines()]
    assert [row["custom_id"] for row in table] == [line["custom_id"] for line in lines]
    assert [row["line"] for row in table] == [line["warmq"]["line"] for line in lines]
    for row, line in zip(table, lines, strict=True):
        body = line["response"]["body"]
        assert orjson.loads(row["response"]) == body
        assert row["text"] == body["choices"][0]["message"]["content"]
        assert (row["finish_reason"], row["completion_tokens"]) == ("stop", 2)
        assert (row["error_code"], row["error_message"]) == (None, None)


def test_failed_requests_go_to_an_object_beside_with_their_errors(
    redis_url: str, store: BatchStore, bucket: Any
):
    name = put(bucket, "in.jsonl", b'{"prompt": "x"}\n{"prompt": 7.5, "custom_id": "odd"}\n')
    assert run_producer("submit", name, "--batch-id", "b1", redis_url=redis_url).returncode == 0
    run_all(store)
    out = "s3://warmq/answers.parquet"
    args = ("results", "b1", "-o", out, "--errors", "s3://warmq/answers.errors.parquet", "--json")
    done = run_producer(*args, redis_url=redis_url)
    assert done.returncode == 1
    assert orjson.loads(done.stdout)["errors_file"] == "s3://warmq/answers.errors.parquet"
    table = rows(read(bucket, "answers.parquet"))
    assert [(row["line"], row["status"]) for row in table] == [(1, "completed"), (2, "failed")]
    (failed,) = rows(read(bucket, "answers.errors.parquet"))
    assert failed == table[1]
    assert (failed["custom_id"], failed["line"], failed["error_code"]) == (
        "odd", 2, "invalid_request",
    )  # fmt: skip
    assert "field prompt" in failed["error_message"]


def test_an_object_that_is_no_earlier_collection_is_not_replaced(
    redis_url: str, store: BatchStore, bucket: Any
):
    name = put(bucket, "in.jsonl", request_lines(3))
    run_producer("submit", name, "--batch-id", "b1", redis_url=redis_url)
    run_all(store)
    for out in ("out.jsonl", "out.parquet"):
        args = ("results", "b1", "-o", f"s3://warmq/{out}")
        assert run_producer(*args, redis_url=redis_url).returncode == 0
        assert run_producer(*args, redis_url=redis_url).returncode == 0  # its own, again
        own = read(bucket, out)
        put(bucket, out, parquet_bytes(2) if out.endswith("parquet") else b"mine\n")
        done = run_producer(*args, redis_url=redis_url)
        assert done.returncode == 2
        assert "not what a collection of batch b1 wrote" in done.stderr
        assert run_producer(*args, "--force", redis_url=redis_url).returncode == 0
        assert read(bucket, out) == own


@pytest.mark.parametrize(
    ("file", "out", "told"),
    [
        ("s3://warmq/none.jsonl", "out.jsonl", "there is no such object"),
        ("s3://", "out.jsonl", "no bucket is named"),
        ("ftp://host/a.jsonl", "out.jsonl", "give an object (s3://BUCKET/NAME, gs://"),
        ("in.jsonl", "s3://no-such-bucket/out.jsonl", "set AWS_ACCESS_KEY_ID"),
        ("in.jsonl", "s3://warmq/", "it names no object"),
        ("in.jsonl", "https://host/out.jsonl", "give s3://, gs:// or az://"),
        ("in.jsonl", "out.csv.gz", "results are JSON lines, parquet or CSV"),
        ("s3://warmq/same.jsonl", "s3://warmq/same.jsonl", "are the same file"),
    ],
)
def test_a_place_that_cannot_be_used_is_told_before_anything_is_queued(
    redis_url: str, store: BatchStore, tmp_path: Path, file: str, out: str, told: str
):
    write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    done = subprocess.run(
        producer_command("submit", file, "-o", out), env=producer_env(redis_url), cwd=tmp_path,
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr) < 600
    assert not store.batches()


def test_the_files_of_a_folder_or_pattern_in_a_bucket_are_one_table(bucket: Any):
    for shard in range(3):
        put(bucket, f"set/data/train-{shard:05}-of-00003.parquet", parquet_bytes(2))
    put(bucket, "settle/other.parquet", parquet_bytes(1))
    for name in ("s3://warmq/set/", "s3://warmq/set/data/train-*.parquet"):
        source = open_source(name, {"prompt": "text"})
        lines = [line for chunk in source.chunks(None, 10**6) for line in chunk.lines]
        assert [number for number, _ in lines] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(InputUnreadable, match="folder without"):
        open_source("s3://warmq/nothing/")


@pytest.mark.parametrize("ending", [".parquet", ""])
def test_partitions_in_a_bucket_are_columns(bucket: Any, ending: str):
    """Consoles make an empty object for each folder, EMR another one beside it."""
    for day in (10, 2):
        put(bucket, f"hive/day={day}/", b"")
        put(bucket, f"hive/day={day}_$folder$", b"")
        for part in (1, 0):
            put(bucket, f"hive/day={day}/00000{part}_0{ending}", parquet_bytes(1))
    for name in ("s3://warmq/hive/", f"s3://warmq/hive/day=*/*{ending}"):
        source = open_source(name, {"prompt": "{day}: {text}"}, ["day"])
        lines = [line for chunk in source.chunks(None, 10**6) for _, line in chunk.lines]
        kept = [orjson.loads(split_kept(line)[1])["day"] for line in lines]
        assert kept == ["2", "2", "10", "10"]


def test_an_object_that_changes_while_it_is_read_ends_the_submit(bucket: Any):
    line = b'{"prompt": "' + b"x" * 100_000 + b'"}\n'
    name = put(bucket, "in.jsonl", line * 200)
    source = open_source(name)
    found = source.chunks(None, 10**6)
    next(found)
    put(bucket, "in.jsonl", line * 201)
    with pytest.raises(InputUnreadable, match=r"in\.jsonl has changed while it was read"):
        list(found)
    source.close()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_results_that_end_half_way_leave_what_was_there_and_no_parts(
    bucket: Any, s3: str, ending: str
):
    def line(number: int) -> ResultLine:
        body = {"choices": [{"text": os.urandom(500_000).hex()}]}
        told = {"id": "batch_req_x", "custom_id": f"r{number}", "error": None}
        told |= {"response": {"body": body}, "warmq": {"line": number}}
        return ResultLine(orjson.dumps(told), False)

    put(bucket, f"out.{ending}", b"as it was")
    with pytest.raises(ZeroDivisionError), ResultFile(f"s3://warmq/out.{ending}") as file:
        for number in range(1, 40):
            file.add(line(number))
        eventually(lambda: unfinished(s3) == 1, 20, "a part is there")
        raise ZeroDivisionError
    gc.collect()  # pyarrow writes an end when a writer is forgotten
    assert read(bucket, f"out.{ending}") == b"as it was"
    assert unfinished(s3) == 0


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_web_server_without_ranges_is_read_too(tmp_path: Path, redis_url: str):
    (tmp_path / "in.parquet").write_bytes(parquet_bytes(1200))
    (tmp_path / "in.jsonl").write_bytes(request_lines(1200))
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with Client(redis_url) as client:
            columns = {"prompt": "text"}
            assert client.submit(f"{url}/in.parquet?sign=a", columns=columns).status().total == 1200
            assert client.submit(f"{url}/in.jsonl?sign=a").status().total == 1200
        server.shutdown()


def test_a_url_that_is_signed_is_read_by_ranges_and_its_signature_is_shown_to_nobody(
    bucket: Any, redis_url: str, store: BatchStore, tmp_path: Path
):
    put(bucket, "in.parquet", parquet_bytes(1200))
    url = obstore.sign(bucket, "GET", "in.parquet", timedelta(minutes=5))
    assert "Signature=" in url
    source = open_source(url, {"prompt": "text"})
    assert sum(len(chunk.lines) for chunk in source.chunks(None, 10**6)) == 1200
    assert source.fingerprint() == source.reopen().fingerprint()
    done = run_producer("submit", url, *MAP, "--batch-id", "b1", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert state(store, "b1").fields["input"].endswith("/warmq/in.parquet")
    obstore.delete(bucket, "in.parquet")
    done = run_producer("submit", url, *MAP, redis_url=redis_url)
    assert done.returncode == 2
    assert "/warmq/in.parquet" in done.stderr
    assert "Signature" not in done.stderr


def test_without_obstore_the_extra_is_named_and_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ExtraMissing, match=r"s3://warmq/a: .*pip install 'warmq\[buckets\]'"):
        open_source("s3://warmq/a")
    with pytest.raises(ExtraMissing, match=r"pip install 'warmq\[buckets\]'"):
        check_output("s3://warmq/a")
    (tmp_path / "in.jsonl").write_bytes(request_lines(2))
    with closing(open_source(str(tmp_path / "in.jsonl"))) as source:
        (chunk,) = source.chunks(None, 10**6)
    assert len(chunk.lines) == 2
