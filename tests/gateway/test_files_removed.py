"""Files and contents go when they have expired, or nobody needs them any more; not before."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import redis
from kit.gateways.gateway_process import stored
from kit.gateways.own_batch_runner import content, record, uploaded

from demo.stack import eventually
from gateway.batches.api.record import after_end, decode, encode, start_batch
from gateway.file_store import open_store
from gateway.files.files import FileRecord, Files
from gateway.http.services import Services

LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n'


def test_files_that_have_expired_and_contents_without_a_record_are_removed(
    services: Services, redis_client: redis.Redis, tmp_path: Path
) -> None:
    files = Files(services)
    for name in ("file-a", "file-b"):
        content(services, [LINE], name)
        services.due.add("file", name)
    now = int(time.time())
    files.create(
        FileRecord(id="file-a", tenant="default", bytes=len(LINE), created_at=now, filename="a",
                   purpose="batch", expires_at=now + 1)
    )  # fmt: skip
    assert files.remove_expired() == 1
    assert stored(tmp_path) == ["file-a"]
    eventually(lambda: files.remove_expired() == 1, 10, "the file has expired and is swept")
    assert stored(tmp_path) == []
    assert files.get("default", "file-a") is None
    assert redis_client.keys("warmq:gateway:due*") == []


def test_one_sweep_takes_all_that_has_expired(services: Services) -> None:
    for number in range(250):
        services.due.add("file", f"file-{number}")
    assert Files(services).remove_expired() == 250
    assert Files(services).remove_expired() == 0


def test_a_file_whose_record_redis_still_has_is_swept_again_and_not_forgotten(
    services: Services, tmp_path: Path
) -> None:
    files, past = Files(services), int(time.time()) - 5
    content(services, [LINE], "file-a")
    expired = FileRecord(
        id="file-a", tenant="default", bytes=len(LINE), created_at=past, filename="a",
        purpose="batch", expires_at=past,
    )  # fmt: skip
    # As with a Redis whose clock is behind: the record is there, though its time is over.
    services.objects.create("file", "default", "file-a", past, msgspec.json.encode(expired))
    services.due.add("file", "file-a")
    assert files.remove_expired() == 0
    services.objects.delete("file", "default", "file-a")
    eventually(lambda: files.remove_expired() == 1, 10, "the content is removed")
    assert stored(tmp_path) == []


def test_what_a_writer_that_died_has_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    folder = open_store(str(tmp_path / "files"))
    with folder.write("file-a") as writer:
        writer.write(LINE)
        folder.remove_unfinished(60, time.time())
        assert len(stored(tmp_path)) == 1
        folder.remove_unfinished(60, time.time() + 61)
        assert stored(tmp_path) == []


@pytest.mark.parametrize("ends", ["completed", "deleted"])
def test_a_content_that_a_batch_reads_stays_until_the_batch_has_ended(
    services: Services, redis_client: redis.Redis, tmp_path: Path, ends: str
) -> None:
    """No gateway ran for as long as one likes, and the first thing that it does is to sweep."""
    files, now = Files(services), int(time.time())
    uploaded(services, [LINE], "file-a", tenant="default")
    start_batch(services, record(now, tenant="default", input_file_id="file-a"))
    assert files.delete("default", "file-a")
    for key in redis_client.keys("warmq:gateway:*"):  # hours later
        if redis_client.pttl(key) > 0:
            redis_client.delete(key)
    redis_client.zadd("warmq:gateway:due:file", {"file-a": 0})
    assert files.remove_expired() == 0
    assert stored(tmp_path) == ["file-a"]
    if ends == "deleted":
        services.objects.delete("batch", "default", "batch_1")
    else:
        read = services.objects.get("batch", "default", "batch_1")
        assert read is not None
        anew = msgspec.structs.replace(decode(read.document), status="completed")
        services.objects.replace("batch", "default", read, encode(anew), now)
        after_end(services, anew)
    redis_client.zadd("warmq:gateway:due:file", {"file-a": 0})
    assert files.remove_expired() == 1
    assert stored(tmp_path) == []
    assert redis_client.keys("warmq:gateway:readers*") == []
