"""How often a batch's file is opened in the store, from its create to its output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.support import chat_line, run_all

from demo.stack import eventually
from gateway.batches.api.record import ENDED, BatchRecord, decode, start_batch
from gateway.batches.runner.carrier import Carrier
from gateway.http.services import Services
from gateway.settings import GatewaySettings

LINES = 1200  # three chunks


class Observed:
    """A store that counts how often each file is opened to be read."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.opened = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, name: str, *between: int) -> Iterator[bytes]:
        self.opened[name] += 1
        found: Iterator[bytes] = self._store.read(name, *between)
        return found

    def local(self, name: str) -> AbstractContextManager[Path]:
        self.opened[name] += 1
        found: AbstractContextManager[Path] = self._store.local(name)
        return found


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    """Return what a gateway works with; any model is configured."""
    settings = GatewaySettings(
        redis_url=redis_url, gateway_store=str(tmp_path / "files"), gateway_models="m"
    )
    found = Services.open(settings)
    yield replace(found, store=Observed(found.store))  # type: ignore[arg-type]
    found.close()


def started(services: Services, model: str = "m", window_s: int = 3600) -> None:
    """Start a batch of so many lines."""
    lines = (orjson.dumps(chat_line(f"r{n}", model=model)) + b"\n" for n in range(LINES))
    with services.store.write("file-1") as writer:
        writer.write(b"".join(lines))
        writer.commit()
    now = int(services.clock.now())
    start_batch(services, BatchRecord(
        id="batch_1", tenant="t", endpoint="/v1/chat/completions", input_file_id="file-1",
        completion_window="1h", created_at=now, expires_at=now + window_s,
        changed_at={"validating": now},
    ))  # fmt: skip


def looked_at(services: Services, carrier: Carrier) -> BatchRecord:
    """Have a carrier look at the batch once; return its record then."""
    services.due.add("batch", "batch_1")
    with ThreadPoolExecutor(1) as pool:
        carrier._look(pool)
    (stored,) = services.objects.several("batch", ["batch_1"])
    assert stored is not None
    return decode(stored.document)


def ended(services: Services, carrier: Carrier) -> BatchRecord:
    def seen() -> BatchRecord | None:
        record = looked_at(services, carrier)
        return record if record.status in ENDED else None

    return eventually(seen, 20, "the batch ends", every_s=0.05)


def opened(services: Services) -> int:
    store: Any = services.store
    return int(store.opened["file-1"])


@pytest.mark.parametrize("cancelled", [False, True])
def test_it_is_looked_through_and_queued_in_one_go_and_not_read_for_the_output(
    services: Services, cancelled: bool
) -> None:
    started(services)
    carrier = Carrier(services, [])
    assert looked_at(services, carrier).status == "in_progress"
    assert opened(services) == 1
    if cancelled:
        batch = services.batches.batch("batch_1")
        assert batch is not None
        services.batches.cancel(batch)
    else:
        assert run_all(services.batches, "warmq.m") == LINES
    record = ended(services, carrier)
    assert record.counts.total == LINES
    assert (record.counts.completed == LINES) is not cancelled
    assert opened(services) == 1


def test_lines_that_were_not_queued_are_read_once_more_for_the_output(services: Services) -> None:
    """No worker has lived until the batch's time is over."""
    started(services, "unknown", window_s=0)
    record = ended(services, Carrier(services, []))
    assert (record.status, record.counts.failed) == ("expired", LINES)
    assert opened(services) <= 2


def test_one_that_waits_for_a_worker_is_opened_once_more_when_there_is_one(
    services: Services,
) -> None:
    started(services, "unknown")
    carrier = Carrier(services, [])
    for _ in range(3):
        assert looked_at(services, carrier).status == "validating"
    assert opened(services) == 1
    settings = services.settings.model_copy(update={"gateway_models": "m,unknown"})
    carrier._services = replace(services, settings=settings)
    assert looked_at(services, carrier).status == "in_progress"
    assert run_all(services.batches, "warmq.unknown") == LINES
    assert ended(services, carrier).counts.completed == LINES
    assert opened(services) == 2
