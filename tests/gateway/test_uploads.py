"""Uploads in parts: the openai SDK unchanged, and what goes wrong on the way."""

from __future__ import annotations

import hashlib
import io
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import redis
from kit.gateways.gateway_process import GatewayProcess, stored

from demo.stack import eventually
from gateway.files import uploads
from gateway.files.uploads import UploadComplete, UploadCreate, UploadRecord, change, get
from gateway.http.caller import Caller
from gateway.http.services import Services
from gateway.redis.api_keys import ApiKeys
from gateway.sweeping import remove_expired_files

MIB = 2**20
DATA = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n' * 40_000


@pytest.fixture
def gateway(redis_url: str, tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(redis_url, tmp_path, gateway_max_file_bytes=80 * MIB) as process:
        yield process


def begin(client: openai.OpenAI, size: int, **more: Any) -> Any:
    asked = {"filename": "in.jsonl", "mime_type": "application/jsonl", "purpose": "batch"} | more
    return client.uploads.create(bytes=size, **asked)


def begun_here(services: Services, data: bytes, upload_id: str = "upload_1") -> UploadRecord:
    """Begin an upload of two parts beside any gateway's process."""
    asked = UploadCreate(bytes=len(data), filename="x", mime_type="text/plain", purpose="batch")
    uploads.create(services, Caller(), asked, upload_id)
    half = len(data) // 2
    for part_id, content in (("part_1", data[:half]), ("part_2", data[half:])):
        with services.store.write(part_id) as writer:
            writer.write(content)
            uploads.add_part(services, Caller(), upload_id, part_id, len(content))
            writer.commit()
    return get(services, "default", upload_id)


BOTH = UploadComplete(part_ids=["part_1", "part_2"])


# -- what clients do -----------------------------------------------------------------------------


def test_the_sdk_uploads_a_file_in_chunks_and_its_parts_are_removed(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    done = client.uploads.upload_file_chunked(
        file=DATA, filename="in.jsonl", bytes=len(DATA), mime_type="application/jsonl",
        purpose="batch", part_size=MIB, md5=hashlib.md5(DATA).hexdigest(),
    )  # fmt: skip
    assert (done.object, done.status, done.bytes) == ("upload", "completed", len(DATA))
    assert done.expires_at == done.created_at + 3600
    assert done.file is not None
    assert (done.file.filename, done.file.purpose, done.file.status) == (
        "in.jsonl", "batch", "processed"
    )  # fmt: skip
    assert client.files.retrieve(done.file.id) == done.file
    assert client.files.content(done.file.id).read() == DATA
    eventually(lambda: stored(tmp_path) == [done.file.id], 20, "the parts are removed")


async def test_the_async_sdk_uploads_a_path(gateway: GatewayProcess, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(DATA)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        done = await client.uploads.upload_file_chunked(
            file=path, mime_type="application/jsonl", purpose="batch"
        )
        assert done.file is not None
        assert (await client.files.content(done.file.id)).read() == DATA


def test_parts_sent_at_once_are_put_together_in_the_order_that_is_named(
    client: openai.OpenAI,
) -> None:
    pieces = [bytes([number]) * 1000 for number in range(24)]
    upload = begin(client, 24_000)
    with ThreadPoolExecutor(8) as pool:
        parts = list(
            pool.map(lambda data: client.uploads.parts.create(upload.id, data=data), pieces)
        )
    assert {(part.object, part.upload_id) for part in parts} == {("upload.part", upload.id)}
    chosen = [part.id for part in reversed(parts)]
    done = client.uploads.complete(upload.id, part_ids=chosen)
    assert done.file is not None
    assert client.files.content(done.file.id).read() == b"".join(reversed(pieces))


def test_the_file_of_an_upload_can_be_told_to_expire(client: openai.OpenAI) -> None:
    upload = begin(client, 1, expires_after={"anchor": "created_at", "seconds": 3600})
    part = client.uploads.parts.create(upload.id, data=b"x")
    done = client.uploads.complete(upload.id, part_ids=[part.id])
    assert done.file is not None and done.file.expires_at == done.file.created_at + 3600


def test_complete_may_be_asked_again(client: openai.OpenAI) -> None:
    upload = begin(client, 1)
    part = client.uploads.parts.create(upload.id, data=b"x")
    done = client.uploads.complete(upload.id, part_ids=[part.id])
    assert client.uploads.complete(upload.id, part_ids=[part.id]) == done
    with pytest.raises(openai.BadRequestError):
        client.uploads.complete(upload.id, part_ids=[])
    with pytest.raises(openai.BadRequestError):
        client.uploads.cancel(upload.id)
    assert len(client.files.list().data) == 1


def test_a_retried_create_or_part_with_a_key_makes_one(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    key = {"Idempotency-Key": "once"}
    upload = begin(client, 1, extra_headers=key)
    assert begin(client, 1, extra_headers=key).id == upload.id
    with pytest.raises(openai.ConflictError):
        begin(client, 2, extra_headers=key)
    part = client.uploads.parts.create(upload.id, data=b"x", extra_headers=key)
    assert client.uploads.parts.create(upload.id, data=b"x", extra_headers=key).id == part.id
    with pytest.raises(openai.ConflictError):
        client.uploads.parts.create(upload.id, data=b"y", extra_headers=key)
    assert stored(tmp_path) == [part.id]
    assert client.uploads.complete(upload.id, part_ids=[part.id]).status == "completed"


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"bytes": 0}, 400, "bytes"),
        ({"bytes": "many"}, 400, "bytes"),
        ({"bytes": 80 * MIB + 1}, 413, "bytes"),
        ({"purpose": "other"}, 400, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "expires_after[seconds]"),
        ({"filename": None}, 400, "filename"),
    ],
)
def test_a_wrong_create_is_refused_by_its_field(
    gateway: GatewayProcess, fields: dict[str, Any], status: int, param: str
) -> None:
    asked = {"bytes": 1, "filename": "a", "mime_type": "text/plain", "purpose": "batch"} | fields
    answer = httpx.post(f"{gateway.url}/v1/uploads", json=asked)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_what_does_not_make_up_the_file_is_refused_and_can_be_put_right(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    upload = begin(client, 4)
    one, two = (client.uploads.parts.create(upload.id, data=data).id for data in (b"ab", b"cd"))
    for part_ids, md5, param in (
        ([one], None, "part_ids"),  # too few bytes
        ([one, one], None, "part_ids"),
        ([one, "part_unknown"], None, "part_ids"),
        ([one, "../../etc/passwd"], None, "part_ids"),
        ([one, two], "0" * 32, "md5"),
        ([one, two], "no digest", "md5"),
    ):
        with pytest.raises(openai.BadRequestError) as told:
            client.uploads.complete(upload.id, part_ids=part_ids, md5=md5 or openai.omit)
        assert told.value.param == param
    assert stored(tmp_path) == sorted([one, two])  # no half file
    done = client.uploads.complete(
        upload.id, part_ids=[one, two], md5=hashlib.md5(b"abcd").hexdigest().upper()
    )
    assert done.file is not None and client.files.content(done.file.id).read() == b"abcd"


def test_a_part_of_more_than_64_mib_is_refused_and_leaves_nothing(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    upload = begin(client, 70 * MIB)
    with pytest.raises(openai.APIStatusError) as told:
        client.uploads.parts.create(upload.id, data=io.BytesIO(bytes(64 * MIB + 1)))
    assert (told.value.status_code, told.value.param) == (413, "data")  # type: ignore[attr-defined]
    assert stored(tmp_path) == []


def test_a_part_without_its_field_is_refused(client: openai.OpenAI, tmp_path: Path) -> None:
    upload = begin(client, 4)
    answer = httpx.post(
        f"{client.base_url}uploads/{upload.id}/parts", files={"file": ("x", b"data")}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "data")
    assert stored(tmp_path) == []


def test_parts_cannot_be_many_times_the_announced_bytes(client: openai.OpenAI) -> None:
    upload = begin(client, 1)
    big = bytes(40 * MIB)
    client.uploads.parts.create(upload.id, data=big)
    with pytest.raises(openai.BadRequestError, match="too many parts"):
        client.uploads.parts.create(upload.id, data=big)


def test_a_cancelled_upload_takes_nothing_more_and_leaves_nothing(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    upload = begin(client, 1)
    part = client.uploads.parts.create(upload.id, data=b"x")
    assert client.uploads.cancel(upload.id).status == "cancelled"
    assert client.uploads.cancel(upload.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.uploads.parts.create(upload.id, data=b"x")
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.uploads.complete(upload.id, part_ids=[part.id])
    eventually(lambda: not stored(tmp_path), 20, "the part is removed")


def test_a_client_that_goes_in_the_middle_of_a_part_leaves_nothing(
    client: openai.OpenAI, gateway: GatewayProcess, tmp_path: Path
) -> None:
    upload = begin(client, 10 * MIB)
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.sendall(
            f"POST /v1/uploads/{upload.id}/parts HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            "Content-Length: 9000000\r\nContent-Type: multipart/form-data; boundary=b\r\n\r\n"
            '--b\r\nContent-Disposition: form-data; name="data"; filename="x"\r\n\r\n'.encode()
            + b"x" * 3 * MIB
        )
        eventually(lambda: stored(tmp_path), 10, "the part is being written")
    eventually(lambda: not stored(tmp_path), 10, "what was written is removed")


def test_uploads_of_another_tenant_look_as_if_they_were_not_there(
    services: Services, gateway: GatewayProcess
) -> None:
    keys: ApiKeys = services.keys
    mine, theirs = (keys.create(tenant)[0] for tenant in ("one", "two"))
    url = f"{gateway.url}/v1"
    eventually(
        lambda: httpx.get(f"{url}/files").status_code == 401, 10, "the gateway knows of the keys"
    )
    with openai.OpenAI(base_url=url, api_key=mine, max_retries=0) as client:
        upload = begin(client, 1)
        part = client.uploads.parts.create(upload.id, data=b"x")
    with openai.OpenAI(base_url=url, api_key=theirs, max_retries=0) as other:
        for refused in (
            lambda: other.uploads.parts.create(upload.id, data=b"x"),
            lambda: other.uploads.complete(upload.id, part_ids=[part.id]),
            lambda: other.uploads.cancel(upload.id),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
        own = begin(other, 1)
        with pytest.raises(openai.BadRequestError):  # a part of another tenant's upload
            other.uploads.complete(own.id, part_ids=[part.id])


# -- what is left when a process dies, or time is over -------------------------------------------


def test_an_upload_that_is_not_completed_expires_with_its_parts(
    services: Services, redis_client: redis.Redis, tmp_path: Path
) -> None:
    begun_here(services, DATA)
    assert len(stored(tmp_path)) == 2
    past = int(time.time()) - 1
    change(services, "default", "upload_1",
           lambda read, _: msgspec.structs.replace(read, expires_at=past))  # fmt: skip
    with pytest.raises(Exception, match="expired"):
        uploads.add_part(services, Caller(), "upload_1", "part_3", 1)
    services.due.add("upload", "upload_1")
    remove_expired_files(services)
    assert get(services, "default", "upload_1").status == "expired"
    assert stored(tmp_path) == []
    long_ago = int(time.time()) - 2 * uploads.REMEMBER_S
    change(services, "default", "upload_1",
           lambda read, _: msgspec.structs.replace(read, changed_at=long_ago))  # fmt: skip
    services.due.add("upload", "upload_1")
    remove_expired_files(services)
    assert [key for key in redis_client.keys("warmq:gateway*") if b"idempotent" not in key] == []


@pytest.mark.parametrize("died_at", ["remove_later", "create"])
def test_a_gateway_that_dies_while_it_completes_is_followed_by_one_that_does_it(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died_at: str
) -> None:
    begun = begun_here(services, DATA)

    def die(*_: object) -> None:
        raise KeyboardInterrupt  # nothing of what handles errors runs

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(uploads.Files, died_at, die)
        uploads.complete(services, Caller(), "upload_1", BOTH)
    assert get(services, "default", "upload_1").status == "completing"
    record, file = uploads.complete(services, Caller(), "upload_1", BOTH)
    assert record.status == "completed"
    assert file is not None and file.id == begun.file_id
    assert b"".join(services.store.read(file.id)) == DATA
    remove_expired_files(services)
    assert stored(tmp_path) == [file.id]


def test_an_upload_cancelled_while_it_completes_has_no_file(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begun_here(services, DATA)
    create = uploads.Files.create

    def cancel_first(files: uploads.Files, record: Any) -> Any:
        uploads.cancel(services, "default", "upload_1")
        return create(files, record)

    monkeypatch.setattr(uploads.Files, "create", cancel_first)
    with pytest.raises(Exception, match="cancelled"):
        uploads.complete(services, Caller(), "upload_1", BOTH)
    remove_expired_files(services)
    assert stored(tmp_path) == []
    assert services.objects.get("file", "default", begun.file_id) is None


def test_an_open_uploads_bytes_are_counted_and_given_back(
    services: Services, tmp_path: Path
) -> None:
    caller = Caller(key_id="k", file_bytes=10)
    asked = UploadCreate(bytes=6, filename="x", mime_type="text/plain", purpose="batch")
    uploads.create(services, caller, asked, "upload_1")
    with pytest.raises(Exception, match="limit reached"):
        uploads.create(services, caller, asked, "upload_2")
    uploads.cancel(services, "default", "upload_1")
    uploads.create(services, caller, asked, "upload_2")
    with services.store.write("part_1") as writer:
        writer.write(b"abcdef")
        uploads.add_part(services, Caller(), "upload_2", "part_1", 6)
        writer.commit()
    uploads.complete(services, caller, "upload_2", UploadComplete(part_ids=["part_1"]))
    remove_expired_files(services)
    with pytest.raises(Exception, match="4 of 10 are left"):
        services.limits.check_bytes(caller, 6)


def test_the_bytes_of_a_create_that_a_gateway_died_in_are_given_back(
    services: Services, redis_client: redis.Redis
) -> None:
    services.limits.check_and_count_bytes(Caller(key_id="k", file_bytes=10), "upload_1", 10)
    services.due.add("upload", "upload_1")
    remove_expired_files(services)
    assert redis_client.keys("warmq:gateway*") == []
