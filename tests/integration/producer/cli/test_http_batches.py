"""What the commands show of batches made over HTTP, and what they refuse to do to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.doctor_findings import doctor
from kit.commands.support import finish, run_producer
from kit.gateways.own_batch_runner import (
    BATCH,
    TENANT,
    created,
    looked_at,
    opened,
    until_ended,
    uploaded,
)
from kit.protocol.lessee import Lessee, client_of, counts, submit_batch

from contract.batch import Batch
from contract.errors import BatchConflict, RequestFailed
from contract.redis import keys
from gateway.batches.api import batches
from gateway.batches.api.record import BatchRecord
from gateway.batches.runner.runner import BatchRunner
from gateway.http.caller import Caller
from gateway.http.services import Services
from producer import Client
from producer.cli.show import iso_time

CALLER = Caller(tenant=TENANT, key_id="k")
ERROR = RequestFailed("it broke", code="broken")


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    with opened(redis_url, tmp_path, gateway_models="m") as found:
        yield found


def line(n: int) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    return {
        "custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body,
    }  # fmt: skip


def running(services: Services, **fields: Any) -> tuple[BatchRunner, Lessee]:
    """Queue a batch of three lines; return its runner, and a worker of its queue."""
    uploaded(services, [line(n) for n in range(3)])
    created(services, **fields)
    runner = BatchRunner(services)
    looked_at(services, runner)
    return runner, Lessee(client_of(services.batches), queue="warmq.m")


def ended(services: Services, **fields: Any) -> BatchRecord:
    """Run a batch of which two of three lines fail."""
    runner, lessee = running(services, **fields)
    first, *others = lessee.pop()
    finish(lessee, others, ERROR)
    finish(lessee, [first])
    return until_ended(services, runner)


def queue_batch(services: Services) -> Batch:
    found = services.batches.batch(BATCH)
    assert found is not None
    return found


# -- retry and delete ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--include", "cancelled"), ("--cut",)])
@pytest.mark.parametrize("state", [running, ended])
def test_a_batch_made_over_http_is_not_run_again_under_its_id(
    services: Services, redis_url: str, state: Any, options: tuple[str, ...]
) -> None:
    state(services)
    before = queue_batch(services).fields
    done = run_producer("retry", BATCH, *options, redis_url=redis_url)
    assert done.returncode == 2
    assert "HTTP" in done.stderr and f"/ui/batches/{BATCH}" in done.stderr
    assert queue_batch(services).fields == before


def test_wrong_lines_over_http_are_corrected_because_no_page_retries_them(
    services: Services, redis_url: str
) -> None:
    wrong = line(1)
    wrong["body"]["colour"] = 1
    uploaded(services, [line(0), wrong])
    created(services)
    runner = BatchRunner(services)
    looked_at(services, runner)
    lessee = Lessee(client_of(services.batches), queue="warmq.m")
    finish(lessee, lessee.pop())
    until_ended(services, runner)
    done = run_producer("retry", BATCH, redis_url=redis_url)
    assert (done.returncode, "HTTP" in done.stderr) == (2, True)
    assert "correct" in done.stderr and "/ui/" not in done.stderr


def test_status_has_the_name_of_the_uploaded_file(services: Services, redis_url: str) -> None:
    ended(services)
    shown = run_producer("status", BATCH, redis_url=redis_url).stdout
    (row,) = [one.split() for one in shown.splitlines() if one.startswith("file ")]
    assert row == ["file", "a", "(file-1)"]


def test_the_client_does_not_run_it_again_either(services: Services, redis_url: str) -> None:
    ended(services)
    with Client(redis_url) as client:
        batch = client.batch(BATCH)
        for again in (batch.retry, batch.retry_cut):
            with pytest.raises(BatchConflict, match="HTTP"):
                again()
    assert counts(queue_batch(services)) == {"completed": 1, "failed": 2}


def letter(services: Services, batch: Batch, number: int) -> None:
    """Make a request of a batch a dead letter that may run again."""
    client, message = client_of(services.batches), b"{}"
    record = ["1", "2", batch.fields["list"], f"id{number}", batch.id, batch.life, "null", "poison"]
    client.hset(keys.DEAD, str(number), "\0".join(record))
    client.lpush(keys.dead_key(str(number)), message)


def test_dead_letters_of_an_ended_batch_made_over_http_stay(
    services: Services, redis_url: str
) -> None:
    ended(services)
    letter(services, queue_batch(services), 900)
    letter(services, submit_batch(services.batches, 1).batch, 901)
    done = run_producer("dead", "retry", "--all", redis_url=redis_url)
    assert "1 dead letter queued again" in done.stderr
    assert "HTTP" in done.stderr
    assert [one["id"] for one in services.batches.dead_letters()] == ["900"]
    assert queue_batch(services).finished
    done = run_producer("dead", "retry", "900", redis_url=redis_url)
    assert (done.returncode, "HTTP" in done.stderr) == (2, True)


def test_dead_letters_of_a_running_batch_made_over_http_run_again(
    services: Services, redis_url: str
) -> None:
    running(services)
    letter(services, queue_batch(services), 900)
    done = run_producer("dead", "retry", "--all", redis_url=redis_url)
    assert "1 dead letter queued again" in done.stderr


def test_a_batch_made_over_http_whose_requests_run_again_is_deleted_only_by_force(
    services: Services, redis_url: str
) -> None:
    ended(services)
    assert services.batches.retry(queue_batch(services), ["failed"]) == 2  # by an older producer
    done = run_producer("delete", BATCH, redis_url=redis_url)
    assert (done.returncode, "--force" in done.stderr) == (2, True)
    assert queue_batch(services).status == "in_progress"
    assert services.objects.owner_of("batch", BATCH) == TENANT
    assert run_producer("delete", BATCH, "--force", redis_url=redis_url).returncode == 0
    assert services.batches.batch(BATCH) is None
    assert services.objects.owner_of("batch", BATCH) is None


# -- list, status, doctor --------------------------------------------------------------------


def test_a_batch_made_over_http_that_waits_for_a_worker_is_listed(
    redis_url: str, tmp_path: Path
) -> None:
    with opened(redis_url, tmp_path) as services:
        uploaded(services, [line(1)])
        created(services)
        assert looked_at(services).status == "validating"
        submit_batch(services.batches, 1, batch_id="other")
    rows = run_producer("list", redis_url=redis_url).stdout.splitlines()
    cells = {row.split()[0]: row.split() for row in rows}
    assert cells[BATCH][1:4] == ["validating", "0/0", "0"]
    assert "other" in cells
    listed = orjson.loads(run_producer("list", "--json", redis_url=redis_url).stdout)
    (shown,) = (one for one in listed if one["id"] == BATCH)
    assert (shown["status"], shown["tenant"]) == ("validating", TENANT)
    facts = doctor(redis_url, 1)["open_batch"]["facts"]
    assert (facts["unfinished"], facts["id"]) == (2, BATCH)


def test_an_ended_batch_made_over_http_does_not_wait(services: Services, redis_url: str) -> None:
    ended(services)
    services.batches.delete(BATCH)
    services.due.add("batch", BATCH)
    assert orjson.loads(run_producer("list", "--json", redis_url=redis_url).stdout) == []


def test_creation_and_duration_of_a_batch_made_over_http_are_those_of_the_api(
    services: Services, redis_url: str
) -> None:
    now = int(services.clock.now())
    record = ended(services, created_at=now - 57)
    shown = batches.retrieve(services, CALLER, BATCH)
    assert shown.created_at == now - 57
    created_at = iso_time(str(shown.created_at * 1000))
    state = orjson.loads(run_producer("status", BATCH, "--json", redis_url=redis_url).stdout)
    assert state["created_at"] == created_at
    assert shown.completed_at is not None
    assert state["finished_at"] == iso_time(str(shown.completed_at * 1000))
    assert state["seconds"] == shown.completed_at - record.changed_at["in_progress"] < 50
    (listed,) = orjson.loads(run_producer("list", "--json", redis_url=redis_url).stdout)
    assert (listed["created_at"], listed["seconds"]) == (created_at, state["seconds"])
    text = run_producer("list", redis_url=redis_url).stdout
    assert str(created_at)[:19] in text
