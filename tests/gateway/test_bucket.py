"""Files in a bucket: obstore against moto's S3 server, and a gateway that keeps its files there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import httpx
import obstore
import openai
import psutil
import pytest
from kit.gateways.gateway_process import GatewayProcess
from kit.servers.s3 import Gate, credentials, google_credentials, s3_server, there, unfinished
from obstore.store import from_url

from demo.stack import eventually
from gateway.file_store import FileStore, FileStoreFailed, open_store

MIB = 2**20
URL = "s3://warmq/some/prefix"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(autouse=True)
def environment(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in credentials(s3).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(environment: None) -> FileStore:
    return open_store(URL)


@pytest.fixture
def google(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A server for `gs://`, whose client tells of an object that is not there to be removed."""
    with Gate(s3, "") as gate:
        for name, value in google_credentials(gate.url, tmp_path).items():
            monkeypatch.setenv(name, value)
        yield gate
    obstore.delete(from_url("s3://warmq"), there(s3))  # what it said it had not removed


def write(bucket: FileStore, name: str, data: bytes) -> int:
    with bucket.write(name) as writer:
        for at in range(0, len(data), MIB):
            writer.write(data[at : at + MIB])
        return writer.commit()


@pytest.mark.parametrize("size", [0, 1, 8 * MIB, 20 * MIB + 7])
def test_a_file_of_one_part_or_of_several_comes_out_as_it_was(bucket: FileStore, size: int) -> None:
    data = os.urandom(size)
    assert write(bucket, "file-a", data) == size
    assert bucket.size("file-a") == size
    assert b"".join(bucket.read("file-a")) == data
    assert max((len(piece) for piece in bucket.read("file-a")), default=0) <= MIB
    with bucket.local("file-a") as path:
        assert path.read_bytes() == data
    assert not path.exists()
    bucket.delete("file-a")
    assert bucket.size("file-a") is None
    bucket.delete("file-a")  # it is gone already


def test_ranges_are_read_alone(bucket: FileStore) -> None:
    data = os.urandom(9 * MIB)
    write(bucket, "file-r", data)
    for start, end in ((0, 1), (5, 5), (8 * MIB - 1, 8 * MIB + 1), (9 * MIB - 3, 9 * MIB)):
        assert b"".join(bucket.read("file-r", start, end)) == data[start:end]
    assert b"".join(bucket.read("file-r", 7 * MIB)) == data[7 * MIB :]
    bucket.delete("file-r")


def test_what_is_not_committed_is_never_there_and_its_parts_are_given_up(
    bucket: FileStore, s3: str
) -> None:
    with pytest.raises(ZeroDivisionError), bucket.write("file-x") as writer:
        writer.write(bytes(20 * MIB))
        assert unfinished(s3) == 1
        raise ZeroDivisionError
    assert bucket.size("file-x") is None
    assert unfinished(s3) == 0
    with bucket.write("file-y") as writer:
        writer.write(b"short")
    assert bucket.size("file-y") is None


def test_a_file_that_is_not_there_cannot_be_read(bucket: FileStore) -> None:
    with pytest.raises(FileStoreFailed):
        list(bucket.read("file-none"))
    with pytest.raises(FileStoreFailed):
        list(bucket.read("file-none", 0, 1))


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".a", "a\0b"])
def test_names_do_not_leave_the_prefix(bucket: FileStore, name: str) -> None:
    with pytest.raises(ValueError, match="not a name"), bucket.write(name):
        pass
    for call in (bucket.size, bucket.delete):
        with pytest.raises(ValueError, match="not a name"):
            call(name)


@pytest.mark.parametrize("url", ["s3://no-such-bucket", "s3://", "nothing://warmq"])
def test_a_bucket_that_cannot_be_used_is_told_at_the_start(url: str) -> None:
    with pytest.raises(FileStoreFailed, match="WARMQ_GATEWAY_STORE"):
        open_store(url)


def test_gateways_that_start_together_do_not_remove_each_others_probe(google: Gate) -> None:
    """Of one name, the second to remove it found none there and did not start."""
    for _ in range(2):
        open_store("gs://warmq/p")
    written = [asked for asked in google.asked if asked.startswith("PUT")]
    assert len(set(written)) == 2
    assert all("/warmq-probe-" in unquote(asked) for asked in written)
    removed = [asked for asked in google.asked if asked.startswith("DELETE")]
    assert [asked.replace("DELETE", "PUT") for asked in removed] == written


def test_a_probe_that_has_gone_already_is_no_reason_not_to_start(google: Gate) -> None:
    google.answers["DELETE"] = 404
    open_store("gs://warmq")


def test_a_bucket_where_nothing_may_be_removed_is_told_at_the_start(google: Gate) -> None:
    google.answers["DELETE"] = 403
    with pytest.raises(FileStoreFailed, match="WARMQ_GATEWAY_STORE: gs://warmq cannot be used"):
        open_store("gs://warmq")


def test_what_fails_is_told_in_one_line(google: Gate) -> None:
    """What obstore says besides is its source code's, and may have a URL with what signs it."""
    bucket = open_store("gs://warmq")
    google.answers["GET"] = 403
    with pytest.raises(FileStoreFailed, match="a file cannot be read in the bucket: The") as caught:
        list(bucket.read("file-a", 0, 1))
    assert "\n" not in caught.value.message


def contents(s3: str) -> list[str]:
    """Return the names of the objects but the mark by which gateways know their store."""
    return sorted(name for name in there(s3) if "/warmq-store-" not in name)


def test_a_gateway_keeps_files_and_uploads_in_a_bucket(
    redis_url: str, s3: str, tmp_path: Path
) -> None:
    data = os.urandom(30 * MIB)
    with (
        GatewayProcess(redis_url, tmp_path, gateway_store=URL) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        made = client.files.create(file=("a", data), purpose="user_data")
        assert client.files.content(made.id).read() == data
        url = f"{gateway.url}/v1/files/{made.id}/content"
        part = httpx.get(url, headers={"range": "bytes=9000000-9000009"})
        assert (part.status_code, part.content) == (206, data[9_000_000:9_000_010])
        done = client.uploads.upload_file_chunked(
            file=data, filename="b", bytes=len(data), mime_type="text/plain", purpose="batch",
            part_size=12 * MIB, md5=hashlib.md5(data).hexdigest(),
        )  # fmt: skip
        assert done.file is not None
        assert client.files.content(done.file.id).read() == data
        left = sorted(f"some/prefix/{name}" for name in (made.id, done.file.id))
        eventually(lambda: contents(s3) == left, 20, "the parts are removed")
        for file in (made, done.file):
            client.files.delete(file.id)
    assert contents(s3) == []
    assert unfinished(s3) == 0


def test_the_memory_of_a_gateway_does_not_grow_with_a_file_in_a_bucket(
    redis_url: str, tmp_path: Path
) -> None:
    with GatewayProcess(redis_url, tmp_path, gateway_store=URL) as gateway:
        assert gateway.process is not None
        process = psutil.Process(gateway.process.pid)
        before = process.memory_info().rss

        def body() -> Iterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
            yield b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
            for number in range(150):
                yield number.to_bytes(4, "big") * (MIB // 4)
            yield b"\r\n--b--\r\n"

        told = {"content-type": "multipart/form-data; boundary=b"}
        made = httpx.post(f"{gateway.url}/v1/files", content=body(), headers=told, timeout=60)
        assert made.json()["bytes"] == 150 * MIB
        with httpx.stream("GET", f"{gateway.url}/v1/files/{made.json()['id']}/content") as answer:
            assert sum(map(len, answer.iter_bytes())) == 150 * MIB
        assert process.memory_info().rss < before + 120 * MIB
