"""A batch at which the carrier itself fails is tried again, and ends."""

from __future__ import annotations

from typing import NoReturn

import pytest
from kit.gateways.own_carrier import created, looked_at

from demo.stack import eventually
from gateway.batches.api.record import BatchRecord, Part
from gateway.batches.runner.carrier import TRIES, Carrier
from gateway.batches.runner.phases import Phases
from gateway.http.services import Services


def fails(*_: object) -> NoReturn:
    raise ZeroDivisionError("a fault of ours")


def looked_until_ended(services: Services) -> tuple[BatchRecord, int]:
    """Look for what is due until the batch has ended and nothing is due; return how often."""
    carrier, looks = Carrier(services), 0

    def look() -> BatchRecord | None:
        nonlocal looks
        looks += 1
        found = looked_at(services, carrier)
        due = services.due.claim("batch", 1)
        return found if found.status in ("failed", "cancelled") and not due else None

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
