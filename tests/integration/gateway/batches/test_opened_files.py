"""How often a batch's file is opened in the store, from its create to its output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.commands.support import chat_line, run_all
from kit.gateways import own_batch_runner
from kit.gateways.own_batch_runner import looked_at, until_ended

from gateway.batches.api.record import start_batch
from gateway.batches.runner.runner import BatchRunner
from gateway.http.services import Services

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
    """Return what a gateway works with; a model is configured."""
    with own_batch_runner.opened(redis_url, tmp_path, gateway_models="m") as found:
        yield replace(found, store=Observed(found.store))  # type: ignore[arg-type]


def started(services: Services, model: str = "m", window_s: int = 3600) -> None:
    """Start a batch of so many lines."""
    own_batch_runner.content(services, [chat_line(f"r{n}", model=model) for n in range(LINES)])
    now = int(services.clock.now())
    start_batch(services, own_batch_runner.record(
        now, expires_at=now + window_s, changed_at={"validating": now}
    ))  # fmt: skip


def opened(services: Services) -> int:
    store: Any = services.store
    return int(store.opened["file-1"])


@pytest.mark.parametrize("cancelled", [False, True])
def test_it_is_looked_through_and_queued_in_one_go_and_not_read_for_the_output(
    services: Services, cancelled: bool
) -> None:
    started(services)
    runner = BatchRunner(services)
    assert looked_at(services, runner).status == "in_progress"
    assert opened(services) == 1
    if cancelled:
        batch = services.batches.batch("batch_1")
        assert batch is not None
        services.batches.cancel(batch)
    else:
        assert run_all(services.batches, "warmq.m") == LINES
    record = until_ended(services, runner)
    assert record.counts.total == LINES
    assert (record.counts.completed == LINES) is not cancelled
    assert opened(services) == 1


def test_lines_that_were_not_queued_are_read_once_more_for_the_output(services: Services) -> None:
    """No worker has lived until the batch's time is over."""
    started(services, "unknown", window_s=0)
    record = until_ended(services, BatchRunner(services))
    assert (record.status, record.counts.failed) == ("expired", LINES)
    assert opened(services) <= 2


def test_one_that_waits_for_a_worker_is_opened_once_more_when_there_is_one(
    services: Services,
) -> None:
    started(services, "unknown")
    runner = BatchRunner(services)
    for _ in range(3):
        assert looked_at(services, runner).status == "validating"
    assert opened(services) == 1
    settings = services.settings.model_copy(update={"gateway_models": "m,unknown"})
    runner._services = replace(services, settings=settings)
    assert looked_at(services, runner).status == "in_progress"
    assert run_all(services.batches, "warmq.unknown") == LINES
    assert until_ended(services, runner).counts.completed == LINES
    assert opened(services) == 2
