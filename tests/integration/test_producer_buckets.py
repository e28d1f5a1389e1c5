"""`submit`, `results` and `run` with buckets: objects are streamed, and appear whole or never."""

from __future__ import annotations

import functools
import gc
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from celery_side import simulated
from obstore.store import from_url
from s3 import credentials, s3_server, there, unfinished
from support import (
    producer_command,
    producer_env,
    queued,
    run_all,
    run_producer,
    state,
    write_lines,
)

from contract.errors import BatchConflict, ExtraMissing
from contract.redis.batches import BatchStore
from contract.results import ResultLine
from demo.stack import eventually
from producer import Client
from producer.core.delivery import Delivery
from producer.core.journal import RunProgress
from producer.core.outputs import ResultFile, check_output
from producer.core.places.object_file import ObjectFile
from producer.core.places.object_place import ObjectPlace
from producer.core.reader import Input, InputUnreadable
from producer.core.sources import open_source

MAP = ("--map", "prompt={text}", "--map", "custom_id=id")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(autouse=True)
def environment(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in credentials(s3).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(s3: str, environment: None) -> Any:
    """Return the bucket, which is empty."""
    store = from_url("s3://warmq")
    for name in there(s3):
        obstore.delete(store, name)
    return store


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
    done = run_producer("results", "b1", "-o", out, "--json", redis_url=redis_url)
    assert done.returncode == 1
    assert orjson.loads(done.stdout)["errors_file"] == "s3://warmq/answers.errors.parquet"
    assert [row["line"] for row in rows(read(bucket, "answers.parquet"))] == [1]
    (failed,) = rows(read(bucket, "answers.errors.parquet"))
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
        assert "it is not an earlier collection of batch b1" in done.stderr
        assert run_producer(*args, "--force", redis_url=redis_url).returncode == 0
        assert read(bucket, out) == own


@pytest.mark.parametrize(
    ("file", "out", "told"),
    [
        ("s3://warmq/none.jsonl", "out.jsonl", "there is no such object"),
        ("s3://", "out.jsonl", "no bucket is named"),
        ("ftp://host/a.jsonl", "out.jsonl", "give s3://, gs://, az:// and a bucket, https://"),
        ("in.jsonl", "s3://no-such-bucket/out.jsonl", "set AWS_ACCESS_KEY_ID"),
        ("in.jsonl", "s3://warmq/", "it names no object"),
        ("in.jsonl", "https://host/out.jsonl", "give s3://, gs:// or az://"),
        ("in.jsonl", "out.csv", "results are JSON lines or parquet"),
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
    assert source.fingerprint() == source.again().fingerprint()
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


# -- run -----------------------------------------------------------------------


def run_command(*args: str | Path, cwd: Path, redis_url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        producer_command("run", *args), env=producer_env(redis_url), cwd=cwd,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_a_run_from_bucket_to_bucket_gives_what_a_run_of_files_gives(
    redis_url: str, bucket: Any, s3: str, tmp_path: Path
):
    name = put(bucket, "in.parquet", parquet_bytes(3000))
    (tmp_path / "in.jsonl").write_bytes(request_lines(3000))
    with simulated(redis_url, tmp_path / "worker.log"):
        window = ("--window", "1000")
        for args in (("in.jsonl", "out.jsonl"), (name, "s3://warmq/out.parquet", *MAP)):
            done = run_command(*args, *window, cwd=tmp_path, redis_url=redis_url)
            assert done.returncode == 0, done.stderr
        again = run_command(
            name, "s3://warmq/out.parquet", *MAP, *window, cwd=tmp_path, redis_url=redis_url
        )
        assert "was complete already, 3000 results" in again.stderr
        other = run_command(
            name, "s3://warmq/out.parquet", "--map", "prompt=id", cwd=tmp_path, redis_url=redis_url
        )
        assert other.returncode == 2
        assert "is of a run of another input or with other options" in other.stderr
    lines = [orjson.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    answers = [(line["custom_id"], line["response"]["body"]["choices"]) for line in lines]
    table = rows(read(bucket, "out.parquet"))
    assert [
        (row["custom_id"], orjson.loads(row["response"])["choices"]) for row in table
    ] == answers
    assert unfinished(s3) == 0
    assert not list(tmp_path.glob("*.lines"))


def test_an_object_that_no_run_has_left_is_not_replaced(
    redis_url: str, bucket: Any, tmp_path: Path
):
    put(bucket, "out.jsonl", b"mine\n")
    (tmp_path / "in.jsonl").write_bytes(request_lines(3))
    done = run_command("in.jsonl", "s3://warmq/out.jsonl", cwd=tmp_path, redis_url=redis_url)
    assert done.returncode == 2
    assert "s3://warmq/out.jsonl exists" in done.stderr
    assert read(bucket, "out.jsonl") == b"mine\n"


def test_a_run_into_a_parquet_file_here_leaves_nothing_else(redis_url: str, tmp_path: Path):
    bad = b'{"custom_id": "odd", "prompt": 7.5}\n'
    (tmp_path / "in.jsonl").write_bytes(request_lines(700) + bad)
    with simulated(redis_url, tmp_path / "worker.log"):
        done = run_command("in.jsonl", "out.parquet", cwd=tmp_path, redis_url=redis_url)
    assert done.returncode == 1, done.stderr
    assert len(rows((tmp_path / "out.parquet").read_bytes())) == 700
    (failed,) = rows((tmp_path / "out.errors.parquet").read_bytes())
    assert failed["custom_id"] == "odd"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl", "out.errors.parquet", "out.parquet", "out.parquet.lines.progress", "worker.log",
    ]  # fmt: skip


def test_what_a_run_delivers_goes_up_in_larger_parts_the_more_it_is(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    delivery = Delivery("s3://warmq/out.jsonl", "s3://warmq/out.errors.jsonl")
    for size, parts in ((0, 3), (60 * 10**9, 2)):  # the journal says how much there is
        delivery.gathered[0].write_bytes(b'{"id":"%s"}\n' % (b"x" * 2**20) * 20)
        delivery.journal.write(RunProgress("r", "", "in", "f", "e", output=size))
        delivery.deliver("seed")
        assert obstore.head(bucket, "out.jsonl")["e_tag"].endswith(f'-{parts}"')


@pytest.mark.parametrize("lines", [1, 20])
def test_of_two_runs_into_one_object_the_second_keeps_its_lines(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: str, lines: int
):
    content = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        delivery = Delivery("s3://warmq/out.jsonl", "s3://warmq/out.errors.jsonl")
        content[name] = b'{"id":"%s"}\n' % (name.encode() * (2**20 + ord(name))) * lines
        delivery.gathered[0].write_bytes(content[name])
        delivery.journal.write(RunProgress("r", "", "in", "f", "e"))
        if name == "a":
            delivery.deliver("seed")
            delivery.gathered[0].write_bytes(content[name])
            delivery.deliver("seed")  # as after a kill before the journal said so
        else:
            with pytest.raises(BatchConflict, match="was written by somebody else"):
                delivery.deliver("seed")
            assert delivery.gathered[0].read_bytes() == content[name]
    assert read(bucket, "out.jsonl") == content["a"]
    assert unfinished(s3) == 0


@pytest.mark.parametrize("lines", [1, 20])
def test_of_two_deliveries_at_once_one_is_refused_and_keeps_its_lines(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: str, lines: int
):
    """The second ends while the first, which has found nothing there, is still writing; the lines
    of both have the same size."""
    monkeypatch.chdir(tmp_path)
    content = {name: b'{"id":"%s"}\n' % (name.encode() * 2**20) * lines for name in "ab"}
    first = ObjectFile("s3://warmq/out.jsonl", owner="run_a")
    first.write(content["a"])
    complete = first._file.close if lines > 1 else None

    def second() -> None:
        with ObjectFile("s3://warmq/out.jsonl", owner="run_b") as file:
            file.write(content["b"])

    class Late:
        """The end of the first upload; the second one tries just before it."""

        def close(self) -> None:
            with pytest.raises(BatchConflict, match="another run is writing s3://warmq/out"):
                second()
            assert complete is not None
            complete()

        def __exit__(self, *error: object) -> None:
            raise AssertionError("discarded")

    if lines > 1:
        first._file = Late()
    first.__exit__(None)
    with pytest.raises(BatchConflict, match="was written by somebody else"):
        second()
    assert read(bucket, "out.jsonl") == content["a"]
    assert (unfinished(s3), there(s3)) == (0, ["out.jsonl"])
    assert first.fingerprint == ObjectPlace("s3://warmq/out.jsonl").fingerprint()


def test_a_delivery_that_was_killed_while_it_wrote_goes_on(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: str
):
    obstore.put(bucket, "out.jsonl.writing", b"run_a")
    large = b'{"id":"%s"}\n' % (b"a" * 2**20) * 20
    for owner in ("run_b", "run_a"):
        file = ObjectFile("s3://warmq/out.jsonl", owner=owner)
        file.write(large)
        if owner == "run_a":
            file.__exit__(None)
            continue
        with pytest.raises(BatchConflict, match="another run is writing"):
            file.__exit__(None)
    assert (read(bucket, "out.jsonl"), there(s3)) == (large, ["out.jsonl"])


def test_a_run_is_complete_only_where_its_own_object_is(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    delivery = Delivery("s3://warmq/out.jsonl", "s3://warmq/out.errors.jsonl")
    (tmp_path / "in").write_text("x")
    delivery.gathered[0].write_bytes(b'{"id":"a"}\n')
    with closing(Input(str(tmp_path / "in"))) as source:
        begin = RunProgress("r", "", "in", source.fingerprint(), "e", complete=True)
        delivery.journal.write(begin)
        delivery.deliver("seed")
        assert delivery.done_before(source, "seed") is not None
        obstore.put(bucket, "out.jsonl", b'{"id":"b"}\n')
        with pytest.raises(BatchConflict, match="is not what this run has delivered"):
            delivery.done_before(source, "seed")


def test_a_run_of_a_pipe_into_a_bucket_is_not_taken_for_another_that_has_ended(
    redis_url: str, bucket: Any, tmp_path: Path
):
    def run(count: int) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            producer_command("run", "-", "s3://warmq/out.jsonl"), env=producer_env(redis_url),
            cwd=tmp_path, input=request_lines(count), capture_output=True, timeout=50, check=False,
        )  # fmt: skip

    with simulated(redis_url, tmp_path / "worker.log"):
        assert run(3).returncode == 0
        other = run(4)
    assert other.returncode == 2
    assert b"is of a run of another input" in other.stderr
    assert len(read(bucket, "out.jsonl").splitlines()) == 3
