"""A batch runner and its connections in the test's own process, and a batch that it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from demo.stack import eventually
from gateway.batches.api.record import ENDED, BatchRecord, decode, encode
from gateway.batches.runner.runner import BatchRunner
from gateway.files.files import FileRecord, Files
from gateway.http.services import Services
from gateway.settings import GatewaySettings

BATCH, FILE, TENANT = "batch_1", "file-1", "t"


@contextmanager
def opened(redis_url: str, folder: Path, **settings: Any) -> Iterator[Services]:
    """Connect to a Redis; files are in a folder `files`."""
    store = str(folder / "files")
    found = Services.open(
        GatewaySettings(_env_file=None, redis_url=redis_url, gateway_store=store, **settings)
    )
    try:
        yield found
    finally:
        found.close()


def content(services: Services, lines: Sequence[Any], name: str = FILE) -> int:
    """Write a file's content without a record; return its size."""
    with services.store.write(name) as writer:
        writer.write(b"".join(line if isinstance(line, bytes) else orjson.dumps(line) + b"\n"
                              for line in lines))  # fmt: skip
        return writer.commit()


def uploaded(services: Services, lines: Sequence[Any], name: str = FILE, **fields: Any) -> None:
    """Write a file as one that its owner has uploaded."""
    size, now = content(services, lines, name), int(services.clock.now())
    given = {"tenant": TENANT, "created_at": now, "filename": "a", "purpose": "batch"} | fields
    Files(services).create(FileRecord(id=name, bytes=size, **given))


def record(now: float, batch_id: str = BATCH, **fields: Any) -> BatchRecord:
    """Return the record of a new batch of an hour."""
    given = {
        "tenant": TENANT, "endpoint": "/v1/chat/completions", "input_file_id": FILE,
        "completion_window": "1h", "created_at": int(now), "expires_at": int(now) + 3600,
    } | fields  # fmt: skip
    return BatchRecord(id=batch_id, **given)


def created(services: Services, **fields: Any) -> None:
    """Write a batch, and make it due."""
    made = record(services.clock.now(), **fields)
    services.objects.create("batch", made.tenant, made.id, made.created_at, encode(made))
    services.due.add("batch", made.id)


def looked_at(
    services: Services, runner: BatchRunner | None = None, *, asks: bool = True
) -> BatchRecord:
    """Run the batch once, making it due first if that `asks`; return its record then."""
    if asks:
        services.due.add("batch", BATCH)
    with ThreadPoolExecutor(1) as pool:
        (runner or BatchRunner(services))._claim_and_run(pool)
    (stored,) = services.objects.get_many("batch", [BATCH])
    assert stored is not None
    return decode(stored.document)


def until_ended(services: Services, runner: BatchRunner | None = None) -> BatchRecord:
    """Run the batch until it has ended; return its record then."""

    def ended() -> BatchRecord | None:
        found = looked_at(services, runner)
        return found if found.status in ENDED else None

    return eventually(ended, 20, "the batch ends", every_s=0.05)
