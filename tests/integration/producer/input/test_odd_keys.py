"""Names of objects with `//`, `..` or what no name may have: refused in words wherever one is
given, and no obstacle where another object has one."""

from __future__ import annotations

import http.client
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kit.commands.bucket_objects import parquet_bytes, put
from kit.commands.support import run_producer, write_lines

from contract.errors import WarmqError
from contract.redis.batches import BatchStore
from producer import Client
from producer.input.bucket import BadPlace
from producer.input.files import ObjectFile, check_object
from producer.input.source import open_source

pytestmark = pytest.mark.usefixtures("bucket_environment")
ODD = ["s3://warmq/a/../c", "s3://warmq/a//c", "s3://warmq//c", "s3://warmq/./c"]


PLACES = [
    ["submit", "{}/", "--map", "prompt=text"],
    ["submit", "{}/*.parquet", "--map", "prompt=text"],
    ["submit", "in.jsonl", "-o", "{}.jsonl"],
    ["submit", "in.jsonl", "-o", "out.jsonl", "--errors", "{}.parquet"],
    ["run", "{}.jsonl", "out.jsonl"],
    ["run", "in.jsonl", "{}.jsonl"],
    ["results", "b1", "-o", "{}.jsonl"],
]


@pytest.mark.parametrize(
    ("words", "name"),
    [*((words, ODD[0]) for words in PLACES), *((["submit", "{}.jsonl"], name) for name in ODD)],
)
def test_a_name_is_refused_in_words_by_every_command(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str,
    words: list[str], name: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    done = run_producer(*(word.format(name) for word in words), redis_url=redis_url)
    assert (done.returncode, "its name has" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert store.batches() == []


@pytest.mark.parametrize("name", [*ODD, "s3://warmq/a\nb"])
def test_the_client_refuses_a_name_with_an_error_of_its_own(
    store: BatchStore, redis_url: str, name: str
) -> None:
    client = Client(redis_url)
    for given, more in ((f"{name}.jsonl", {}), (f"{name}/", {"columns": {"prompt": "text"}})):
        with pytest.raises(WarmqError, match="its name has"):
            client.submit(given, **more)
    assert store.batches() == []


def ask_raw(url: str, verb: str, key: str) -> None:
    """Put or delete an object whose name obstore would not take."""
    who = "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request, Signature=0"
    with closing(http.client.HTTPConnection(url.removeprefix("http://"))) as connection:
        connection.putrequest(verb, f"/warmq/{key}")
        connection.putheader("Authorization", who)
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        assert connection.getresponse().status in (200, 204)


@pytest.mark.parametrize("odd", ["set/../b.parquet", "set/./b.parquet"])
def test_an_odd_name_in_a_folder_is_named_and_hinders_no_other_object(
    bucket: Any, s3: str, odd: str
) -> None:
    put(bucket, "set/a.parquet", parquet_bytes(1))
    ask_raw(s3, "PUT", odd)
    try:
        for name in ("s3://warmq/set/", "s3://warmq/set/*.parquet"):
            with pytest.raises(BadPlace, match=f"there is an object '{odd}', whose name") as raised:
                open_source(name, {"prompt": "text"})
            assert "AWS_" not in raised.value.message
        open_source("s3://warmq/set/a.parquet", {"prompt": "text"}).close()
        for name in ("s3://warmq/set", "s3://warmq/set/out.jsonl"):
            check_object(name)
        with ObjectFile("s3://warmq/set/out.jsonl") as file:
            file.write(b"x")
    finally:
        ask_raw(s3, "DELETE", odd)
