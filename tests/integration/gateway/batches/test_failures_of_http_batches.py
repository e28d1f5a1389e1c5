"""Failures by code of a batch made over HTTP: from its queue batches, at its end in its record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kit.commands.support import finish
from kit.gateways.own_batch_runner import (
    BATCH,
    TENANT,
    created,
    looked_at,
    opened,
    until_ended,
    uploaded,
)
from kit.protocol.lessee import Lessee, client_of, submit_batch

from contract.errors import BatchConflict, RequestFailed, RequestRejected
from gateway.batches.api import batches
from gateway.batches.api.failures import failures_of_view
from gateway.batches.runner.runner import BatchRunner
from gateway.http.caller import Caller
from gateway.http.services import Services
from gateway.page.batches import row_of
from gateway.page.failed import failed_codes, retry_of
from producer.over_http import HttpBatches

CALLER = Caller(tenant=TENANT, key_id="k")
QUEUE = "warmq.m"


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    with opened(redis_url, tmp_path, gateway_models="m") as found:
        yield found


def line(n: int, **body: Any) -> dict[str, Any]:
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    return {
        "custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": asked | body,
    }  # fmt: skip


def shown(services: Services, batch_id: str = BATCH) -> tuple[dict[str, int], list[Any]]:
    """Return the counts by code in the answer of GET, and the page's failures."""
    found, view = batches.find(services, CALLER, batch_id)
    counts = found.failures if found.failures is not msgspec.UNSET else []
    return {one.code: one.count for one in counts}, failures_of_view(services, view)


def test_failures_are_shown_while_the_batch_runs_and_stay_when_its_results_are_gone(
    services: Services,
) -> None:
    uploaded(services, [line(1), line(2, wrong=1), line(3), line(4)])
    created(services)
    runner = BatchRunner(services)
    looked_at(services, runner)
    lessee = Lessee(client_of(services.batches), queue=QUEUE)
    first, second, third = lessee.pop()
    finish(lessee, [first, second], RequestFailed("it broke", code="broken"))
    counts, codes = shown(services)
    assert counts == {"broken": 2, "unknown_field": 1}
    assert [one.custom_id for one in codes[0].first] == ["c1", "c3"]
    finish(lessee, [third])
    while looked_at(services, runner).status != "completed":
        pass
    services.batches.delete(BATCH, force=True)
    counts, codes = shown(services)
    assert counts == {"broken": 2, "unknown_field": 1}
    (wrong,) = codes[1].first
    assert (wrong.custom_id, wrong.line) == ("c2", 2)
    assert "wrong" in wrong.message


def test_a_batch_without_failures_has_no_such_field(services: Services) -> None:
    uploaded(services, [line(1)])
    created(services)
    looked_at(services)
    assert shown(services) == ({}, [])
    assert b"failures" not in msgspec.json.encode(batches.retrieve(services, CALLER, BATCH))


def test_failures_of_a_submitted_batch_are_shown(services: Services) -> None:
    submit_batch(services.batches, 2, batch_id="b1", tenant=TENANT)
    lessee = Lessee(client_of(services.batches))
    finish(lessee, lessee.pop(), RequestFailed("it broke", code="broken"))
    counts, codes = shown(services, "b1")
    assert counts == {"broken": 2}
    assert [one.line for one in codes[0].first] == [1, 2]


def test_cancelled_requests_of_a_batch_made_over_http_are_among_its_failures(
    services: Services,
) -> None:
    uploaded(services, [line(1), line(2, wrong=1), line(3), line(4)])
    created(services)
    runner = BatchRunner(services)
    looked_at(services, runner)
    lessee = Lessee(client_of(services.batches), queue=QUEUE)
    finish(lessee, lessee.pop(1), RequestFailed("it broke", code="broken"))
    batches.cancel(services, CALLER, BATCH)
    services.batches.cancel(services.batches.states([BATCH])[0])  # type: ignore[arg-type]
    expected = {"broken": 1, "unknown_field": 1, "cancelled": 2}
    assert shown(services)[0] == expected
    assert until_ended(services, runner).status == "cancelled"
    found, view = batches.find(services, CALLER, BATCH)
    assert (shown(services)[0], found.request_counts.failed) == (expected, 4)
    row = row_of(view, 0.0)
    assert row is not None
    assert (row["failed"], row["cancelled"]) == (2, 2)
    assert sorted(row["failures"]) == [("broken", 1), ("unknown_field", 1)]


def test_cancelled_requests_of_a_submitted_batch_are_among_its_failures(
    services: Services,
) -> None:
    submitted = submit_batch(services.batches, 2, batch_id="b1", tenant=TENANT)
    services.batches.cancel(submitted.batch)
    assert shown(services, "b1") == ({"cancelled": 2}, [])


def test_a_request_that_is_too_long_is_not_offered_for_a_retry(services: Services) -> None:
    uploaded(services, [line(1), line(2, wrong=1), line(3)])
    created(services)
    runner = BatchRunner(services)
    looked_at(services, runner)
    lessee = Lessee(client_of(services.batches), queue=QUEUE)
    first, second = lessee.pop()
    finish(lessee, [first], RequestFailed("it broke"))
    finish(lessee, [second], RequestRejected("too long", code="context_length_exceeded"))
    while looked_at(services, runner).status != "completed":
        pass
    _, view = batches.find(services, CALLER, BATCH)
    row = row_of(view, 0)
    retry = retry_of(services, view, row, failed_codes(services, view, row))
    assert (retry.failed, retry.invalid, retry.anew) == (1, 2, True)
    queued = services.batches.batch(BATCH)
    assert queued is not None
    with pytest.raises(BatchConflict, match="2 failed lines are wrong themselves"):
        HttpBatches.using(services.batches).refuse_retry(queued)
