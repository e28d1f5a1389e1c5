"""Deadlines of batches and requests, and how long results live; with real processes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from kit.commands.support import (
    batch_file,
    chat_line,
    finish,
    queued,
    run_producer,
    state,
    write_lines,
)
from kit.protocol.lessee import QUEUE, Lessee, bury_alive, celery_message, chat, client_of, stored

from contract import naming
from contract.errors import RequestFailed
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import Worker, eventually
from producer.cli.show import batch_json, iso_time

#: Shared machines are slow at times; what waits here has deadlines of its own.
pytestmark = pytest.mark.timeout(200)
#: Has passed when the submit ends.
PAST = "0.001s"
RUNS_FOR_EVER = "simulate:sleep=600"
StartWorker = Callable[..., Worker]


@pytest.fixture
def start_worker(redis_url: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Return a function that starts simulated workers, which are stopped at the end."""
    workers: list[Worker] = []

    def start(**settings: Any) -> Worker:
        defaults = {
            "engine": "simulated", "simulated_slots": 4, "simulated_latency_s": 0, "lease_s": 5,
            "drain_timeout_s": 1,
        }  # fmt: skip
        log = tmp_path / f"worker{len(workers)}.log"
        workers.append(Worker(redis_url, log, **(defaults | settings)).start())
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


def submit(path: Path, *options: str, redis_url: str) -> dict[str, Any]:
    """Submit as batch b1; return its state."""
    done = run_producer("submit", path, "--batch-id", "b1", "--json", *options, redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    final: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return final


def expire_all(store: BatchStore) -> None:
    """Let POP meet everything that waits; nothing of it may be leased."""
    lessee = Lessee(client_of(store))
    assert lessee.pop() == []
    while lessee.head[3]:
        assert lessee.pop() == []


def retry(*options: str, redis_url: str) -> None:
    done = run_producer("retry", "b1", *options, redis_url=redis_url)
    assert done.returncode == 0, done.stderr


def test_a_batch_whose_deadline_passed_in_the_queue_expires_without_running(
    redis_url: str, store: BatchStore, tmp_path: Path, start_worker: StartWorker
):
    lines: list[Any] = [chat_line(f"r{i}", user=RUNS_FOR_EVER) for i in range(1200)]
    shown = submit(write_lines(tmp_path / "in", [*lines, b"bad"]), "--deadline", PAST,
                   redis_url=redis_url)  # fmt: skip
    assert shown["expires_at"] == iso_time(str(int(state(store, "b1").created) + 1))

    start_worker()
    eventually(lambda: state(store, "b1").finished, 40)

    batch = state(store, "b1")
    assert batch.status == "expired"  # a bad line never had a deadline to keep
    assert (batch.number("expired"), batch.number("failed")) == (1200, 1)
    done = run_producer("results", "b1", redis_url=redis_url)
    assert done.returncode == 1
    codes = [orjson.loads(line)["error"]["code"] for line in done.stdout.splitlines()]
    assert codes == ["expired"] * 1200 + ["invalid_json"]


def test_running_requests_are_aborted_at_the_deadline_and_their_slots_freed(
    redis_url: str, store: BatchStore, tmp_path: Path, start_worker: StartWorker
):
    start_worker()
    eventually(lambda: store.workers(QUEUE), 40, "a worker is ready")
    lines = [chat_line(f"r{i}", user=RUNS_FOR_EVER) for i in range(30)]
    submit(write_lines(tmp_path / "in", lines), "--deadline", "1.5s", redis_url=redis_url)

    eventually(lambda: state(store, "b1").finished, 20)
    after = run_producer("submit", batch_file(tmp_path / "next", 5), "--wait", redis_url=redis_url)

    assert state(store, "b1").status == "expired"
    assert after.returncode == 0, after.stderr
    assert client_of(store).zcard(keys.LEASES) == 0


def test_expired_requests_get_a_new_life_without_the_old_deadline(
    redis_url: str, store: BatchStore, tmp_path: Path, start_worker: StartWorker
):
    submit(batch_file(tmp_path / "in", 1300), "--deadline", PAST, redis_url=redis_url)
    expire_all(store)
    assert state(store, "b1").status == "expired"

    retry(redis_url=redis_url)
    assert state(store, "b1").finished, "expired requests are retried only if asked for"
    retry("--include", "expired", redis_url=redis_url)
    assert batch_json(state(store, "b1"))["expires_at"] is None
    assert {m["headers"]["warmq"]["deadline"] for m in queued(store)} == {None}

    start_worker()
    eventually(lambda: state(store, "b1").finished, 40)
    assert state(store, "b1").status == "completed"
    assert state(store, "b1").number("completed") == 1300


def test_failed_requests_that_are_retried_keep_a_deadline_that_lies_ahead(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    shown = submit(batch_file(tmp_path / "in", 3), "--deadline", "3d", redis_url=redis_url)
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop(), RequestFailed("once"))

    retry(redis_url=redis_url)

    assert batch_json(state(store, "b1"))["expires_at"] == shown["expires_at"]
    created = int(state(store, "b1").created)
    ours = [m["headers"]["warmq"]["deadline"] for m in queued(store)]
    assert ours == [(created + 3 * 86_400_000) / 1000] * 3


def test_only_deadline_and_time_of_a_retried_message_change(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    # What looks like a deadline or a time inside the prompt or the custom_id is text.
    trap = '"created":"1","life":"2","deadline":1.5,"expires":"2020" [] {} '
    trap += '\\"deadline\\":1.5 "deadline":2'
    path = write_lines(tmp_path / "in", [chat_line(trap, trap, stop=[trap], user='"deadline":3')])
    shown = submit(path, "--deadline", PAST, redis_url=redis_url)
    (before,) = queued(store)
    expire_all(store)

    retry("--include", "expired", redis_url=redis_url)

    (after,) = queued(store)
    assert after["headers"]["warmq"].pop("deadline") is None
    times = [int(one["headers"]["warmq"].pop("created")) for one in (before, after)]
    assert times == sorted(times)
    assert times[0] == int(state(store, "b1").created)
    deadline = before["headers"]["warmq"].pop("deadline")
    assert deadline == dt.datetime.fromisoformat(shown["expires_at"]).timestamp()
    assert after == before


def test_a_dead_letter_that_is_queued_again_is_not_held_to_its_past_deadline(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
):
    message = celery_message("late", expires="2020-01-01T00:00:00+00:00", warmq={"deadline": 1.5})
    assert store.retry_dead([bury_alive(redis_client, message)]) == 1
    (lease,) = Lessee(redis_client).pop()
    headers = orjson.loads(lease.message)["headers"]
    assert (headers["expires"], headers["warmq"]["deadline"]) == (None, None)


def test_a_resumed_submit_keeps_the_deadline_and_another_one_is_refused(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    path = batch_file(tmp_path / "in", 700)
    first = submit(path, "--deadline", "120m", redis_url=redis_url)
    again = submit(path, "--deadline", "2h", redis_url=redis_url)
    assert again["expires_at"] == first["expires_at"]
    assert first["expires_at"] is not None

    for options in ([], ["--deadline", "3h"]):
        done = run_producer("submit", path, "--batch-id", "b1", *options, redis_url=redis_url)
        assert done.returncode == 2
        assert "other options" in done.stderr


def test_status_shows_the_deadline(redis_url: str, store: BatchStore, tmp_path: Path):
    submit(batch_file(tmp_path / "in", 1), "--deadline", "2030-01-02T03:04:05+01:00",
           redis_url=redis_url)  # fmt: skip
    assert (
        "deadline  2030-01-02T02:04:05+00:00"
        in run_producer("status", "b1", redis_url=redis_url).stdout
    )


def test_celery_expires_ends_one_request_of_many(
    redis_client: redis.Redis, start_worker: StartWorker
):
    redis_client.lpush(QUEUE, celery_message("late", expires="2020-01-01T00:00:00+00:00"))
    redis_client.lpush(QUEUE, celery_message("in time", expires="2199-01-01T00:00:00+00:00"))
    start_worker()
    eventually(lambda: stored(redis_client, "in time"), 40)
    assert eventually(lambda: stored(redis_client, "late"))["status"] == "REVOKED"  # type: ignore[index]
    assert stored(redis_client, "in time")["status"] == "SUCCESS"  # type: ignore[index]


def test_a_batch_that_takes_longer_than_results_live_loses_none(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, tmp_path: Path,
    start_worker: StartWorker,
):  # fmt: skip
    # Three days against a life of seven, in seconds: a plain Celery result is the clock.
    lines = [chat_line(f"r{i}", f"question {i}") for i in range(40)]
    lines += [chat_line("slow", user=RUNS_FOR_EVER)]
    submit(write_lines(tmp_path / "in", lines), redis_url=redis_url)
    redis_client.lpush(QUEUE, celery_message("clock", chat()))
    first = start_worker(result_ttl_s=3)
    eventually(lambda: stored(redis_client, "clock"), 40)
    eventually(lambda: state(store, "b1").number("completed") == 40, 40)
    eventually(lambda: stored(redis_client, "clock") is None, 20, "a life of a result is over")
    early = run_producer("results", "b1", "--partial", redis_url=redis_url)
    assert len(early.stdout.splitlines()) == 40
    first.kill()

    # The batch ends, and from then on its results have their time.
    start_worker(result_ttl_s=30)
    store.cancel_request(state(store, "b1"), "slow")
    eventually(lambda: redis_client.pttl(keys.batch_key("b1")) > 0, 20, "the batch retires")
    done = run_producer("results", "b1", redis_url=redis_url)
    assert len(done.stdout.splitlines()) == 41
    lives = [redis_client.pttl(key) for key in redis_client.keys(naming.RESULT_PREFIX + "*")]
    assert all(0 < life <= redis_client.pttl(keys.batch_key("b1")) + 1000 for life in lives)
