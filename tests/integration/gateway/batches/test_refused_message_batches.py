"""A message batch that is refused holds nothing of its tenant's budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from kit.gateways.own_batch_runner import opened

from contract.redis.records import Records
from gateway.batches.anthropic.batches import create
from gateway.file_store import FileStoreFailed, Writer
from gateway.files.files import FileRecord, Files
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.http.services import Services
from gateway.redis.limits import Budgets

FILE = FileRecord(
    id="file-1", tenant="t", bytes=400, created_at=1000, filename="a", purpose="batch", digest="a"
)


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    with opened(redis_url, tmp_path) as found:
        yield found


def asked(services: Services, file: FileRecord = FILE, file_bytes: int | None = None) -> None:
    """Ask for a batch; afterwards its tenant holds the tokens of none."""
    caller = Caller(tenant="t", enqueued_tokens=10_000, file_bytes=file_bytes)
    try:
        with services.store.write(file.id) as writer:
            create(services, caller, "msgbatch_1", writer, file, 1)
    finally:
        assert not sum(Budgets.using(services.batches).enqueued("t").values())


def test_one_whose_file_is_another_one(services: Services) -> None:
    Files(services).create(FILE)
    with pytest.raises(ApiError) as raised:
        asked(services, msgspec.structs.replace(FILE, digest="b"))
    assert raised.value.status == 409


def test_one_whose_tenant_may_keep_no_more_bytes(services: Services) -> None:
    with pytest.raises(ApiError) as raised:
        asked(services, file_bytes=399)
    assert raised.value.status in (413, 429)


def test_one_whose_tenant_may_keep_no_more_records(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Records, "most_bytes", lambda _: 0)
    with pytest.raises(ApiError) as raised:
        asked(services)
    assert raised.value.status == 429


def test_one_that_the_store_does_not_keep(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Writer) -> int:
        raise FileStoreFailed("no room")

    monkeypatch.setattr(Writer, "commit", full)
    with pytest.raises(FileStoreFailed):
        asked(services)
