"""Files over HTTP: the openai SDK unchanged, and forms as other clients send them."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import redis
from kit.gateways.gateway_process import GatewayProcess, stored

from demo.stack import eventually
from gateway.files.files import FileRecord, Files
from gateway.http.services import Services
from gateway.settings import GatewaySettings

LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n'
MIB = 2**20


@pytest.fixture
def gateway(redis_url: str, tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(redis_url, tmp_path, gateway_max_file_bytes=64 * MIB) as process:
        yield process


def test_a_file_goes_in_and_comes_out_as_it_was(client: openai.OpenAI, tmp_path: Path) -> None:
    data = LINE * 40_000  # several pieces
    made = client.files.create(file=("in.jsonl", data), purpose="batch")
    assert (made.object, made.bytes, made.filename) == ("file", len(data), "in.jsonl")
    assert (made.purpose, made.status) == ("batch", "processed")
    assert client.files.wait_for_processing(made.id).id == made.id
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == data
    assert stored(tmp_path) == [made.id]
    assert client.files.delete(made.id).deleted
    assert stored(tmp_path) == []
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.delete(made.id)


def test_a_key_that_was_forgotten_never_changes_the_file_that_it_made(
    client: openai.OpenAI, redis_client: redis.Redis
) -> None:
    def send(content: bytes) -> openai.types.FileObject:
        headers = {"Idempotency-Key": "k"}
        return client.files.create(
            file=("in.jsonl", content), purpose="batch", extra_headers=headers
        )

    made = send(LINE)
    for key in redis_client.keys("warmq:gateway:idempotent:*"):
        redis_client.delete(key)  # as a day later
    assert send(LINE) == made
    for key in redis_client.keys("warmq:gateway:idempotent:*"):
        redis_client.delete(key)
    with pytest.raises(openai.ConflictError):
        send(LINE * 2)
    assert client.files.content(made.id).read() == LINE


async def test_the_async_sdk_uploads_bytes_without_a_name(gateway: GatewayProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        made = await client.files.create(file=LINE, purpose="batch")
        assert made.filename == "upload"
        assert (await client.files.content(made.id)).text == LINE.decode()


def test_the_sdk_pages_over_all_files_of_a_purpose_in_either_order(client: openai.OpenAI) -> None:
    made = []
    for number in range(25):
        purpose = "batch" if number % 2 else "evals"
        made.append(client.files.create(file=(f"{number}", LINE), purpose=purpose))  # type: ignore[arg-type]
    newest = [file.id for file in client.files.list(limit=4)]
    assert sorted(newest) == sorted(file.id for file in made)
    assert [file.id for file in client.files.list(limit=3, order="asc")] == newest[::-1]
    wanted = {file.id for file in made if file.purpose == "batch"}
    assert {file.id for file in client.files.list(limit=5, purpose="batch")} == wanted
    page = client.files.list(limit=5, purpose="fine-tune")
    assert (page.data, page.has_more) == ([], False)
    for limit, code in ((0, "integer_below_min_value"), (10_001, "integer_above_max_value")):
        with pytest.raises(openai.BadRequestError) as told:
            client.files.list(limit=limit)
        assert (told.value.code, told.value.param) == (code, "limit")
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-of-somebody-else")


def form(*parts: tuple[str, str, bytes]) -> bytes:
    """Return a multipart body of (name, more of its disposition, content)."""
    body = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
        % (name.encode(), more.encode(), content)
        for name, more, content in parts
    )
    return body + b"--b--\r\n"


def post(
    gateway: GatewayProcess, content: bytes | Iterator[bytes], **headers: str
) -> httpx.Response:
    told = {"content-type": "multipart/form-data; boundary=b"} | headers
    return httpx.post(f"{gateway.url}/v1/files", content=content, headers=told)


FILE = ("file", '; filename="in.jsonl"', LINE)
PURPOSE = ("purpose", "", b"batch")


def test_a_file_before_its_purpose_and_without_a_length_is_taken_as_node_sends_it(
    gateway: GatewayProcess,
) -> None:
    body = form(FILE, PURPOSE)
    pieces = (body[at : at + 7] for at in range(0, len(body), 7))  # cut within boundaries, too
    made = post(gateway, pieces).json()
    assert (made["bytes"], made["purpose"]) == (len(LINE), "batch")
    content = httpx.get(f"{gateway.url}/v1/files/{made['id']}/content")
    assert content.content == LINE


@pytest.mark.parametrize(
    "fields",
    [
        [("expires_after[anchor]", "", b"created_at"), ("expires_after[seconds]", "", b"3600")],
        [("expires_after", "", b'{"anchor":"created_at","seconds":3600}')],
    ],
    ids=["brackets", "json"],
)
def test_a_file_can_be_told_to_expire(
    gateway: GatewayProcess, fields: list[tuple[str, str, bytes]]
) -> None:
    made = post(gateway, form(PURPOSE, *fields, FILE)).json()
    assert made["expires_at"] == made["created_at"] + 3600


@pytest.mark.parametrize(
    ("parts", "status", "param"),
    [
        ([PURPOSE], 400, "file"),
        ([FILE], 400, "purpose"),
        ([FILE, ("purpose", "", b"other")], 400, "purpose"),
        ([FILE, PURPOSE, FILE], 400, "file"),
        ([FILE, PURPOSE, ("expires_after[anchor]", "", b"created_at")], 400,
         "expires_after[seconds]"),
        ([FILE, PURPOSE, ("expires_after", "", b"{")], 400, "expires_after"),
        ([PURPOSE, ("file", '; filename="x"', b"x" * (65 * MIB))], 413, "file"),
        ([FILE, PURPOSE, ("notes", "", b"x" * 70_000)], 400, None),
    ],
)  # fmt: skip
def test_a_bad_form_is_refused_by_its_field_and_leaves_nothing(
    gateway: GatewayProcess,
    tmp_path: Path,
    parts: list[tuple[str, str, bytes]],
    status: int,
    param: str | None,
) -> None:
    answer = post(gateway, form(*parts))
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert stored(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=b", b"no form"),
        ("multipart/form-data; boundary=b", form(PURPOSE, FILE)[:-20]),
    ],
)
def test_what_is_no_form_is_refused(gateway: GatewayProcess, kind: str, content: bytes) -> None:
    answer = post(gateway, content, **{"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_multipart")


def test_a_client_that_goes_in_the_middle_leaves_nothing(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50000000\r\n"
            b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
            + form(PURPOSE, ("file", '; filename="x"', b"x" * 3 * MIB))[:-10]
        )
        eventually(lambda: stored(tmp_path), 10, "the file is being written")
    eventually(lambda: not stored(tmp_path), 10, "what was written is removed")


def test_ranges_and_etags_let_a_download_go_on(
    client: openai.OpenAI, gateway: GatewayProcess
) -> None:
    data = bytes(range(256)) * 10
    made = client.files.create(file=("../../etc/na\nme", data), purpose="user_data")
    url = f"{gateway.url}/v1/files/{made.id}/content"
    whole = httpx.get(url)
    assert whole.headers["content-type"] == "application/octet-stream"
    assert whole.headers["content-disposition"].startswith("attachment;")
    assert "/" not in whole.headers["content-disposition"].removeprefix("attachment; ")
    etag = whole.headers["etag"]

    def ranged(text: str, **more: str) -> tuple[int, bytes]:
        answer = httpx.get(url, headers={"range": text} | more)
        return answer.status_code, answer.content

    assert ranged("bytes=10-19") == (206, data[10:20])
    assert ranged("bytes=2550-") == (206, data[2550:])
    assert ranged("bytes=-6") == (206, data[-6:])
    assert ranged("bytes=0-99999") == (206, data)
    assert ranged("bytes=2560-")[0] == 416
    assert ranged("bytes=1-2,5-6") == (200, data)
    assert ranged("bytes=10-19", **{"if-range": etag}) == (206, data[10:20])
    assert ranged("bytes=10-19", **{"if-range": '"another"'}) == (200, data)
    assert httpx.get(url, headers={"if-none-match": etag}).status_code == 304


def test_a_retried_upload_makes_one_file_and_another_content_is_refused(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    key = {"Idempotency-Key": "upload-1"}
    first = client.files.create(file=("a", LINE), purpose="batch", extra_headers=key)
    again = client.files.create(file=("a", LINE), purpose="batch", extra_headers=key)
    assert again.id == first.id
    with pytest.raises(openai.ConflictError) as told:
        client.files.create(file=("a", LINE + LINE), purpose="batch", extra_headers=key)
    assert told.value.response.headers["x-should-retry"] == "false"
    assert client.files.content(first.id).read() == LINE
    assert stored(tmp_path) == [first.id]


def test_a_full_disk_is_an_error_and_leaves_no_half_file(redis_url: str, tmp_path: Path) -> None:
    with GatewayProcess(redis_url, tmp_path) as gateway:
        assert gateway.process is not None
        # No file of the process may grow beyond 2 MiB: the write fails as on a full disk.
        psutil.Process(gateway.process.pid).rlimit(psutil.RLIMIT_FSIZE, (2 * MIB, 2 * MIB))
        answer = post(gateway, form(PURPOSE, ("file", '; filename="x"', b"x" * 5 * MIB)))
        assert answer.status_code == 507
        assert answer.json()["error"]["code"] == "file_store_failed"
        assert stored(tmp_path) == []
        assert post(gateway, form(PURPOSE, FILE)).status_code == 200


def test_the_memory_of_a_gateway_does_not_grow_with_a_file(redis_url: str, tmp_path: Path) -> None:
    with GatewayProcess(redis_url, tmp_path) as gateway:
        assert gateway.process is not None
        process = psutil.Process(gateway.process.pid)
        head, tail = form(PURPOSE, ("file", '; filename="x"', b"")).split(b"\r\n\r\n\r\n--b--")
        before, digest = process.memory_info().rss, hashlib.sha256()

        def body() -> Iterator[bytes]:
            yield head + b"\r\n\r\n"
            for number in range(200):
                piece = number.to_bytes(4, "big") * (MIB // 4)
                digest.update(piece)
                yield piece
            yield b"\r\n--b--" + tail

        made = post(gateway, body()).json()
        assert made["bytes"] == 200 * MIB
        found = hashlib.sha256()
        with httpx.stream("GET", f"{gateway.url}/v1/files/{made['id']}/content") as answer:
            for piece in answer.iter_bytes():
                found.update(piece)
        assert found.digest() == digest.digest()
        assert process.memory_info().rss < before + 60 * MIB


def test_a_head_of_a_content_tells_its_size_and_sends_nothing(
    client: openai.OpenAI, gateway: GatewayProcess
) -> None:
    made = client.files.create(file=("a", LINE), purpose="batch")
    answer = httpx.head(f"{gateway.url}/v1/files/{made.id}/content")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == str(len(LINE))


def test_a_purpose_is_found_among_many_files_of_another(
    client: openai.OpenAI, redis_url: str, tmp_path: Path
) -> None:
    settings = GatewaySettings(redis_url=redis_url, gateway_store=str(tmp_path / "files"))
    services = Services.open(settings)
    for number in range(1203):
        purpose = "evals" if number in (0, 600, 1202) else "batch"
        Files(services).create(
            FileRecord(id=f"file-{number:04}", tenant="default", bytes=1, created_at=number,
                       filename="x", purpose=purpose)
        )  # fmt: skip
    services.close()
    pages = [client.files.list(limit=1, purpose="evals")]
    while pages[-1].has_more:
        pages.append(pages[-1].get_next_page())
    assert [[file.id for file in page.data] for page in pages] == [
        ["file-1202"], ["file-0600"], ["file-0000"]
    ]  # fmt: skip
