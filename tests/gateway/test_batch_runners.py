"""Carriers without Redis, and batches at which they fail: one that starts waits for Redis, nobody
keeps what he gave up, and a batch is tried again, and ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import redis
from kit.gateways.own_batch_runner import created, looked_at

from contract.redis.batches import BatchStore
from contract.redis.due import Claim, Due
from demo.stack import ROOT, RedisServer, eventually
from gateway.batches.api.record import BatchPart, BatchRecord
from gateway.batches.runner.phases import Phases
from gateway.batches.runner.runner import TRIES, BatchRunner
from gateway.http.services import Services
from gateway.redis.leases import LeaseLost


@contextmanager
def waiting_runner(redis_url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a batch runner that finds no Redis."""
    log = folder / "runner.log"
    env = {
        "PYTHONPATH": str(ROOT), "WARMQ_REDIS_URL": redis_url,
        "WARMQ_GATEWAY_STORE": str(folder / "files"),
    }  # fmt: skip
    command = [sys.executable, "-m", "gateway.batches.runner"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, stderr=file, cwd=ROOT)
    try:
        eventually(lambda: "is Redis running" in log.read_text(), 30, "it has found no Redis")
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_batch_runner_that_starts_while_redis_is_away_waits_for_it(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    with waiting_runner(server.url, tmp_path) as process, server, server.client() as client:
        Due.using(BatchStore(client, ttl_ms=60_000)).add("batch", "batch_never")
        eventually(lambda: not client.exists("warmq:gateway:due:batch"), 30, "it has looked at it")
        process.terminate()
        assert process.wait(20) == 0


def test_a_batch_runner_that_waits_for_redis_ends_when_it_is_told_to(tmp_path: Path) -> None:
    with waiting_runner(RedisServer(tmp_path / "redis").url, tmp_path) as process:
        process.terminate()
        assert process.wait(20) == 0


def test_what_a_batch_runner_gives_up_is_free_at_once_if_nobody_has_taken_it(
    services: Services, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    created(services)

    def renewed_late(*_: object) -> None:
        """Redis was away for longer than the lease; the renewal came through all the same."""
        (name,) = redis_client.zrange("warmq:gateway:due:batch", 0, -1)
        redis_client.zincrby("warmq:gateway:due:batch", 60_000, name)
        raise LeaseLost

    monkeypatch.setattr(Phases, "run", renewed_late)
    runner = BatchRunner(services)
    with ThreadPoolExecutor(1) as pool:
        runner._claim_and_run(pool)
    (claim,) = services.due.claim("batch", 1000)
    assert claim.id == "batch_1"
    # What another one has claimed since stays with that one.
    assert services.due.renew([claim], 60_000) == [True]
    runner._release(Claim("batch", "batch_1", "another token"), 0)
    assert services.due.claim("batch", 1000) == []


def fails(*_: object) -> NoReturn:
    raise ZeroDivisionError("a fault of ours")


def looked_until_ended(services: Services) -> tuple[BatchRecord, int]:
    """Look for what is due until the batch has ended and nothing is due; return how often."""
    runner, looks = BatchRunner(services), 0

    def look() -> BatchRecord | None:
        nonlocal looks
        looks += 1
        found = looked_at(services, runner, asks=False)
        due = services.due.claim("batch", 1)
        return found if found.status in ("failed", "cancelled") and not due else None

    return eventually(look, 10, "the batch ends", every_s=0.01), looks


def test_one_that_cannot_be_looked_through_fails_after_some_tries(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Phases, "_read_input", fails)
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
    monkeypatch.setattr(Phases, "_read_input", fails)
    created(services, expires_at=1)
    record, _ = looked_until_ended(services)
    assert record.status == "failed"


def test_one_whose_results_cannot_be_written_ends_without_them(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Phases, "_queue_and_finish", fails)
    created(services, status="in_progress", parts=[BatchPart("batch_1", "", "warmq", [""])])
    services.batches.create("batch_1", "0" * 40, {"tenant": "t", "queue": "warmq"})
    record, looks = looked_until_ended(services)
    assert looks >= 2 * TRIES
    assert record.status == "failed"
    part = services.batches.batch("batch_1")
    assert part is not None
    assert "cancelling" in part.fields
