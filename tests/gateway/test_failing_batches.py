"""A batch at which the carrier itself fails is tried again, and ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from demo.stack import eventually
from gateway.batches.api.record import BatchRecord, Part, decode, encode
from gateway.batches.runner import carrier as carrying
from gateway.batches.runner.carrier import TRIES, Carrier
from gateway.batches.runner.phases import Phases
from gateway.http.services import Services
from gateway.settings import GatewaySettings


@pytest.fixture
def services(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    """Return what a gateway works with; what fails is tried again at once."""
    monkeypatch.setattr(carrying, "FAILED_MS", 1)
    settings = GatewaySettings(redis_url=redis_url, gateway_store=str(tmp_path / "files"))
    found = Services.open(settings)
    yield found
    found.close()


def created(services: Services, **fields: Any) -> None:
    given = {"expires_at": int(time.time()) + 3600} | fields
    record = BatchRecord(
        id="batch_1", tenant="t", endpoint="/v1/chat/completions", input_file_id="file-1",
        completion_window="24h", created_at=int(time.time()), **given,
    )  # fmt: skip
    services.objects.create("batch", "t", "batch_1", 1, encode(record))
    services.due.add("batch", "batch_1")


def fails(*_: object) -> NoReturn:
    raise ZeroDivisionError("a fault of ours")


def looked_until_ended(services: Services) -> tuple[BatchRecord, int]:
    """Look for what is due until the batch has ended and nothing is due; return how often."""
    carrier, looks = Carrier(services, []), 0

    def look() -> BatchRecord | None:
        nonlocal looks
        looks += 1
        with ThreadPoolExecutor(1) as pool:
            carrier._look(pool)
        (stored,) = services.objects.several("batch", ["batch_1"])
        assert stored is not None
        record = decode(stored.document)
        due = services.due.claim("batch", 1)
        return record if record.status in ("failed", "cancelled") and not due else None

    return eventually(look, 10, "the batch ends", every_s=0.01), looks


def test_one_that_cannot_be_looked_through_fails_after_some_tries(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Phases, "_look", fails)
    created(services)
    record, looks = looked_until_ended(services)
    assert looks >= TRIES
    assert record.status == "failed"
    (problem,) = record.problems
    assert problem.code == "internal_error"
    assert "ZeroDivisionError" in problem.message
    assert "a fault of ours" not in problem.message


def test_at_its_deadline_it_is_not_tried_again(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Phases, "_look", fails)
    created(services, expires_at=1)
    record, _ = looked_until_ended(services)
    assert record.status == "failed"


def test_one_whose_results_cannot_be_written_ends_without_them(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Phases, "_run", fails)
    created(services, status="in_progress", parts=[Part("batch_1", "", "warmq", [""])])
    services.batches.create("batch_1", "0" * 40, {"tenant": "t", "queue": "warmq"})
    record, looks = looked_until_ended(services)
    assert looks >= 2 * TRIES
    assert record.status == "failed"
    part = services.batches.batch("batch_1")
    assert part is not None
    assert "cancelling" in part.fields
