"""Records of gateways have an end, those of a release before ends had been thought of, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from kit.gateways.own_batch_runner import opened
from kit.protocol.lessee import client_of

from contract.redis.objects import Objects, Stored
from gateway.batches.api import record as ending
from gateway.batches.api.record import (
    KEPT_S,
    BatchRecord,
    Status,
    decode,
    encode,
    end_older_records,
)
from gateway.files.files import FileRecord, Files
from gateway.files.uploads import REMEMBER_S, UploadRecord
from gateway.files.uploads import encode as encode_upload
from gateway.http.services import Services
from gateway.sweeping import forget_records, remove_expired_files


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    with opened(redis_url, tmp_path) as found:
        yield found


def write_as_before(
    services: Services, batch_id: str, status: Status, *, tenant: str = "t",
    ended_at: int | None = None, api: Any = "openai",
) -> BatchRecord:  # fmt: skip
    """Write a batch as a release does that neither counts records nor ends them."""
    now = int(services.clock.now())
    record = BatchRecord(
        id=batch_id, tenant=tenant, api=api, endpoint="/v1/messages", input_file_id="file-1",
        completion_window="24h", created_at=now - 1000, expires_at=now + 1000, status=status,
        changed_at={} if ended_at is None else {status: ended_at},
    )  # fmt: skip
    services.objects.create("batch", tenant, batch_id, record.created_at, encode(record))
    if api == "anthropic":
        services.objects.create("message_batch", tenant, batch_id, record.created_at, b"null")
    counts = [f"warmq:gateway:records:{tenant}", "warmq:gateway:records"]
    client_of(services.batches).delete(*counts)
    return record


def end_of(client: redis.Redis, kind: str, object_id: str) -> int:
    """Return when Redis removes an object, in seconds since 1970; -1: never, -2: it is gone."""
    left_ms = int(client.pttl(f"warmq:gateway:{kind}:{object_id}"))
    seconds, microseconds = client.time()
    return left_ms if left_ms < 0 else round(seconds + microseconds / 1e6 + left_ms / 1000)


@pytest.mark.parametrize("status", ["completed", "failed", "expired", "cancelled"])
def test_a_batch_that_ended_before_records_had_an_end_gets_one_once(
    services: Services, redis_client: redis.Redis, status: Status
) -> None:
    ended_at = int(services.clock.now()) - 100
    record = write_as_before(services, "batch_1", status, ended_at=ended_at)
    assert end_of(redis_client, "batch", "batch_1") == -1
    assert end_older_records(services, "t") == 1
    assert end_of(redis_client, "batch", "batch_1") == ended_at + KEPT_S
    assert [found.id for found in services.records.of("t")] == ["batch_1"]
    assert services.records.bytes_of("t") > len(encode(record))
    stored = services.objects.get("batch", "t", "batch_1")
    assert stored is not None
    assert decode(stored.document) == record
    assert end_older_records(services, "t") == 0  # it is known by now
    assert services.objects.get("batch", "t", "batch_1") == stored


def test_a_batch_whose_end_nobody_noted_is_kept_from_its_deadline_on(
    services: Services, redis_client: redis.Redis
) -> None:
    record = write_as_before(services, "batch_1", "completed")
    assert end_older_records(services, "t") == 1
    assert end_of(redis_client, "batch", "batch_1") == record.expires_at + KEPT_S


def test_a_batch_that_ended_longer_ago_than_records_are_kept_goes_with_its_count(
    services: Services, redis_client: redis.Redis
) -> None:
    ended_at = int(services.clock.now()) - KEPT_S - 1
    write_as_before(services, "batch_1", "completed", ended_at=ended_at)
    assert end_older_records(services, "t") == 1
    assert end_of(redis_client, "batch", "batch_1") == -2
    forget_records(services)
    assert services.records.owners() == {}


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
def test_a_running_batch_is_counted_and_has_no_end(
    services: Services, redis_client: redis.Redis, status: Status
) -> None:
    write_as_before(services, "batch_1", status, ended_at=1000)
    assert end_older_records(services, "t") == 0
    assert end_of(redis_client, "batch", "batch_1") == -1
    assert [found.id for found in services.records.of("t")] == ["batch_1"]


def test_both_records_of_a_message_batch_end_together(
    services: Services, redis_client: redis.Redis
) -> None:
    ended_at = int(services.clock.now())
    write_as_before(services, "msgbatch_1", "completed", ended_at=ended_at, api="anthropic")
    assert end_older_records(services, "t") == 1
    assert end_of(redis_client, "batch", "msgbatch_1") == ended_at + KEPT_S
    assert end_of(redis_client, "message_batch", "msgbatch_1") == ended_at + KEPT_S


def test_batches_of_many_pages_end_and_other_tenants_and_gone_ones_cost_nothing(
    services: Services, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_PAGE", 2)
    ended_at = int(services.clock.now())
    for n in range(5):
        write_as_before(services, f"batch_{n}", "completed", ended_at=ended_at)
    write_as_before(services, "batch_other", "completed", ended_at=ended_at, tenant="other")
    redis_client.delete("warmq:gateway:batch:batch_3")  # only its name is still in the list
    assert end_older_records(services, "t") == 4
    assert end_of(redis_client, "batch", "batch_other") == -1
    assert end_older_records(services, "other") == 1


def test_a_batch_that_its_batch_runner_writes_meanwhile_is_not_overwritten(
    services: Services, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_as_before(services, "batch_1", "completed", ended_at=int(services.clock.now()))
    several = Objects.get_many

    def then_written(objects: Objects, kind: Any, ids: Any) -> list[Stored | None]:
        found = several(objects, kind, ids)
        assert found[0] is not None
        assert objects.replace("batch", "t", found[0], b'{"newer":1}', 1000) is not None
        return found

    monkeypatch.setattr(Objects, "get_many", then_written)
    assert end_older_records(services, "t") == 0
    stored = services.objects.get("batch", "t", "batch_1")
    assert stored is not None
    assert stored.document == b'{"newer":1}'


@pytest.mark.parametrize("status", ["completed", "cancelled", "expired", "pending"])
def test_an_upload_goes_a_day_after_its_end(
    services: Services, redis_client: redis.Redis, status: Any
) -> None:
    now = int(services.clock.now())
    for upload_id, age_s in (("upload_old", REMEMBER_S + 1), ("upload_new", REMEMBER_S - 60)):
        record = UploadRecord(
            id=upload_id, tenant="t", bytes=10, created_at=now - age_s, expires_at=now + 60,
            filename="f", purpose="batch", file_id="file-1", status=status, changed_at=now - age_s,
        )  # fmt: skip
        document = encode_upload(record)
        services.objects.create("upload", "t", upload_id, record.created_at, document)
        services.due.add("upload", upload_id)
    remove_expired_files(services)
    open_one = status == "pending"  # it has not ended
    assert end_of(redis_client, "upload", "upload_old") == (-1 if open_one else -2)
    assert end_of(redis_client, "upload", "upload_new") == -1
    counted = {"upload_old", "upload_new"} if open_one else {"upload_new"}
    assert {found.id for found in services.records.of("t")} == counted


def test_an_upload_that_nobody_completes_ends_and_is_looked_at_again(services: Services) -> None:
    now = int(services.clock.now())
    record = UploadRecord(
        id="upload_1", tenant="t", bytes=10, created_at=now - 3601, expires_at=now - 1,
        filename="f", purpose="batch", file_id="file-1",
    )  # fmt: skip
    services.objects.create("upload", "t", "upload_1", record.created_at, encode_upload(record))
    services.due.add("upload", "upload_1")
    remove_expired_files(services)
    stored = services.objects.get("upload", "t", "upload_1")
    assert stored is not None
    assert b'"expired"' in stored.document
    assert client_of(services.batches).zscore("warmq:gateway:due:upload", "upload_1") is not None


def test_an_empty_file_counts_until_it_expires(
    services: Services, redis_client: redis.Redis
) -> None:
    now = int(services.clock.now())
    for file_id, expires_at in (("file-past", now - 1), ("file-later", now + 600)):
        with services.store.write(file_id) as writer:
            writer.commit()
        Files(services).create(FileRecord(
            id=file_id, tenant="t", bytes=0, created_at=now - 10, filename="f", purpose="batch",
            expires_at=expires_at,
        ))  # fmt: skip
    remove_expired_files(services)
    forget_records(services)
    assert end_of(redis_client, "file", "file-past") == -2
    assert end_of(redis_client, "file", "file-later") == now + 600
    assert [found.id for found in services.records.of("t")] == ["file-later"]
