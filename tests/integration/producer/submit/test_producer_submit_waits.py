"""Submitting where Redis is full, refuses writes or dies: it waits, or says how to go on."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.commands.submitting import assert_queued_once, submit
from kit.commands.support import (
    TTL_MS,
    batch_file,
    finish,
    producer_command,
    producer_env,
    queued,
    run_producer,
    state,
)
from kit.protocol.lessee import Lessee, client_of

from contract.redis.batches import BatchStore
from contract.redis.connect import connect
from contract.settings import Settings
from demo.stack import RedisServer, eventually
from producer.submit.submit import Summary


@pytest.fixture
def small_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of its own that a test may fill, freeze or turn into a replica."""
    with RedisServer(tmp_path / "redis", "--appendonly", "no") as server:
        yield server


@pytest.fixture
def small_store(small_redis: RedisServer) -> Iterator[BatchStore]:
    with connect(small_redis.url, "test") as client:
        yield BatchStore(client, ttl_ms=TTL_MS)


def test_a_full_redis_makes_submit_wait_until_there_is_room(
    small_store: BatchStore, tmp_path: Path
):
    redis = client_of(small_store)
    used = redis.info("memory")["used_memory"]
    redis.config_set("maxmemory", used + 1_500_000)
    waits: list[str] = []

    def report(summary: Summary) -> None:
        if summary.waiting:
            waits.append(summary.waiting)
            redis.config_set("maxmemory", 0)  # the operator makes room

    path = batch_file(tmp_path / "in", 1700)
    settings = Settings(_env_file=None, high_water=(used + 500_000) / (used + 1_500_000))
    summary = submit(small_store, path, report=report, settings=settings)

    assert waits and waits[0].startswith("Redis uses ")
    assert summary.waiting == ""
    assert_queued_once(small_store, 1700)


def test_a_long_queue_makes_submit_wait_until_it_is_shorter(store: BatchStore, tmp_path: Path):
    told: list[str] = []

    def report(summary: Summary) -> None:
        if summary.waiting and not told:
            told.append(summary.waiting)
            lessee = Lessee(client_of(store))
            finish(lessee, lessee.pop(1000))  # a worker takes them

    settings = Settings(_env_file=None, high_water_requests=1000)
    submit(store, batch_file(tmp_path / "in", 1700), report=report, settings=settings)

    assert told == ["1000 requests wait in the queue"]
    assert state(store, "b1").number("completed") == 1000
    assert len(queued(store)) == 700


def test_an_interrupted_wait_says_how_to_resume(redis_url: str, store: BatchStore, tmp_path: Path):
    path = batch_file(tmp_path / "in", 1700)
    env = producer_env(redis_url, WARMQ_HIGH_WATER_REQUESTS="500")
    with subprocess.Popen(
        producer_command("submit", path, "--batch-id", "b1"), env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr
        told = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        told += process.stderr.read()
    assert process.returncode == 130
    assert "waiting: 500 requests wait in the queue" in told
    assert "--batch-id b1 goes on where it stopped" in told
    assert "Traceback" not in told

    submit(store, path)
    assert_queued_once(store, 1700)


def refuse_by_memory(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("maxmemory", 100_000)


def refuse_as_replica(server: RedisServer) -> None:
    with server.client() as client:
        client.replicaof("127.0.0.1", "1")


@pytest.mark.parametrize(
    ("refuse", "remedy"),
    [(refuse_by_memory, "Redis is full"), (refuse_as_replica, "this server is a replica")],
)
def test_a_redis_that_refuses_writes_is_told_with_the_remedy(
    small_redis: RedisServer, tmp_path: Path, refuse, remedy: str
):
    refuse(small_redis)
    path = batch_file(tmp_path / "in", 10)

    done = run_producer("submit", path, "--batch-id", "b1", redis_url=small_redis.url)

    assert done.returncode == 3
    assert remedy in done.stderr
    assert "the same command with --batch-id b1 goes on where it stopped" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_redis_that_dies_in_the_middle_is_told_and_the_batch_resumed(
    small_redis: RedisServer, small_store: BatchStore, tmp_path: Path
):
    path = batch_file(tmp_path / "in", 1700)
    with subprocess.Popen(
        producer_command("submit", "-", "--batch-id", "b1"), env=producer_env(small_redis.url),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin
        data = path.read_bytes()
        half = data.index(b"\n", len(data) // 2) + 1
        process.stdin.write(data[:half])
        process.stdin.flush()
        eventually(lambda: (b := small_store.batch("b1")) and b.number("cursor") == 500, 30)
        client_of(small_store).config_set("min-replicas-to-write", 1)  # no write is taken any more
        _, told = process.communicate(data[half:])
    assert process.returncode == 3
    assert b"--batch-id b1 goes on where it stopped" in told
    client_of(small_store).config_set("min-replicas-to-write", 0)

    submit(small_store, path)

    assert_queued_once(small_store, 1700)
