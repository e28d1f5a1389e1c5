"""`metadata.stop_after_failures`: a batch over HTTP is cancelled when too many requests fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
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

from contract.errors import RequestFailed
from contract.redis import keys
from gateway.batches.api import batches
from gateway.batches.runner.runner import BatchRunner
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.http.services import Services

CALLER = Caller(tenant=TENANT, key_id="k")
ERROR = RequestFailed("it broke", code="broken")


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    with opened(redis_url, tmp_path, gateway_models="m,n") as found:
        yield found


def line(n: int, model: str) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    return {
        "custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body,
    }  # fmt: skip


def create(services: Services, **metadata: str) -> str:
    body = {
        "input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h",
        "metadata": metadata,
    }  # fmt: skip
    return batches.create(services, CALLER, orjson.dumps(body), "").id


def test_all_queue_batches_are_cancelled_when_one_is_stopped(services: Services) -> None:
    uploaded(services, [line(n, "m" if n % 2 else "n") for n in range(20)])
    created(services, metadata={"stop_after_failures": "3"})
    runner = BatchRunner(services)
    looked_at(services, runner)
    lessee = Lessee(client_of(services.batches), queue="warmq.m")
    finish(lessee, lessee.pop(5), ERROR)
    until_ended(services, runner)
    found = batches.retrieve(services, CALLER, BATCH)
    assert found.status == "cancelled"
    assert found.errors is not None
    (error,) = found.errors.data
    assert error.code == "too_many_failures"
    assert error.message.startswith("stopped: 5 of 5 requests failed")
    assert (found.request_counts.completed, found.request_counts.failed) == (0, 20)


@pytest.mark.parametrize("value", ["0", "101%", "never", ""])
def test_a_wrong_limit_is_refused_with_its_field(services: Services, value: str) -> None:
    uploaded(services, [line(1, "m")])
    with pytest.raises(ApiError) as refused:
        create(services, stop_after_failures=value)
    assert (refused.value.status, refused.value.param) == (400, "metadata.stop_after_failures")


def test_a_batch_of_a_version_that_took_any_text_runs(services: Services) -> None:
    uploaded(services, [line(1, "m")])
    created(services, metadata={"stop_after_failures": "never"})
    assert looked_at(services).status == "in_progress"


def test_a_stopped_batch_of_producer_submit_has_the_reason(services: Services) -> None:
    submit_batch(services.batches, 4, batch_id="b1", tenant=TENANT)
    client_of(services.batches).hset(keys.batch_key("b1"), "stop_after", "2")
    lessee = Lessee(client_of(services.batches))
    finish(lessee, lessee.pop(2), ERROR)
    found = batches.retrieve(services, CALLER, "b1")
    assert found.status == "cancelling"
    assert found.errors is not None
    assert found.errors.data[0].code == "too_many_failures"
