"""`metadata.warmq_reuse`: a batch over HTTP is answered from known answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.known import announce, answer_all, asked, reusing
from kit.commands.submitting import submit
from kit.commands.support import write_lines
from kit.gateways.own_batch_runner import (
    BATCH,
    TENANT,
    created,
    looked_at,
    opened,
    until_ended,
    uploaded,
)
from kit.protocol.lessee import client_of

from gateway.batches.api import batches
from gateway.batches.runner.runner import BatchRunner
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.http.services import Services
from gateway.metrics.series import series
from gateway.redis.fleet import FleetReads

CALLER = Caller(tenant=TENANT, key_id="k")


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    with opened(redis_url, tmp_path, gateway_models="m") as found:
        announce(client_of(found.batches), queue="warmq.m")
        yield found


def line(n: int) -> dict[str, Any]:
    return {
        "custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions",
        "body": asked(f"question {n}", model="m"),
    }  # fmt: skip


def create(services: Services, reuse: str, **fields: Any) -> str:
    body = {
        "input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h",
        "metadata": {"warmq_reuse": reuse},
    }  # fmt: skip
    return batches.create(services, CALLER, orjson.dumps(body | fields), "").id


def test_a_batch_has_the_known_answers_and_counts_them(services: Services, tmp_path: Path) -> None:
    # Given answers to questions of the tenant
    path = write_lines(tmp_path / "in", map(line, range(6)))
    submit(services.batches, path, reusing("b1", queue="warmq.m", tenant=TENANT))
    assert len(answer_all(services.batches, tenant=TENANT, queue="warmq.m")) == 6
    # When a batch over HTTP asks them again
    uploaded(services, [line(n) for n in range(6)])
    created(services, metadata={"warmq_reuse": "7d"})
    until_ended(services, BatchRunner(services))
    # Then it has ended without a worker
    found = batches.retrieve(services, CALLER, BATCH)
    assert (found.status, found.request_counts.completed, found.cached) == ("completed", 6, 6)
    assert found.metadata == {"warmq_reuse": "7d"}
    # And the object, the page and the command line count the same tokens: none
    part = services.batches.batch(BATCH)
    assert part is not None
    assert (found.usage.total_tokens, part.number("prompt_tokens")) == (0, 0)
    # And the metrics count the tenant's lines
    fleet = FleetReads.using(services.batches).fleet(["warmq.m"])
    samples = [one for each in series(fleet, {}, [TENANT], 0.9) for one in each.samples]
    counted = [(one.labels, one.value) for one in samples if one.name == "warmq_reused_total"]
    assert counted == [({"tenant": TENANT}, 6)]


@pytest.mark.parametrize("value", ["", "week", "0s"])
def test_a_wrong_age_is_refused_with_its_field(services: Services, value: str) -> None:
    uploaded(services, [line(1)])
    with pytest.raises(ApiError) as refused:
        create(services, value)
    assert (refused.value.status, refused.value.param) == (400, "metadata.warmq_reuse")


def test_an_order_is_refused_with_it(services: Services) -> None:
    uploaded(services, [line(1)])
    with pytest.raises(ApiError) as refused:
        create(services, "any", order="prefix")
    assert (refused.value.status, refused.value.param) == (400, "order")


def test_a_batch_of_a_version_that_took_any_text_runs(services: Services) -> None:
    uploaded(services, [line(1)])
    created(services, metadata={"warmq_reuse": "week"})
    assert batches.retrieve(services, CALLER, BATCH).status == "validating"


def test_lines_that_are_not_computed_count_no_tokens(services: Services, tmp_path: Path) -> None:
    # Given three lines with one body, of which one is computed
    uploaded(services, [line(1) | {"custom_id": f"c{n}"} for n in range(3)])
    created(services, once=True)
    looked_at(services)
    assert len(answer_all(services.batches, tenant=TENANT, queue="warmq.m")) == 1
    until_ended(services)
    # Then the object has the tokens of one answer, as the queue batch has
    found, part = batches.retrieve(services, CALLER, BATCH), services.batches.batch(BATCH)
    assert part is not None
    assert (found.request_counts.completed, found.usage.total_tokens) == (3, 5)
    assert part.number("prompt_tokens") + part.number("completion_tokens") == 5
