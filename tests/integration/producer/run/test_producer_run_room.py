"""`producer run` where Redis has little room: windows end early, and wait for others."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kit.commands.runs import (
    custom_ids,
    done_windows,
    running,
    served,
    windows,
)
from kit.commands.submitting import LIMITS
from kit.commands.support import (
    TTL_MS,
    chat_line,
    run_all,
    write_lines,
)
from kit.protocol.lessee import Lessee, client_of

from contract import naming
from contract.batch import Batch
from contract.redis.batches import BatchStore
from contract.redis.connect import connect
from demo.stack import RedisServer, eventually
from producer.input.reader import Input
from producer.run.windows import Run
from producer.submit.submission import Submission

pytestmark = pytest.mark.timeout(120)


MIB = 2**20


@pytest.fixture
def small_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of 20 MiB, of which requests may take 12."""
    with RedisServer(
        tmp_path / "redis", "--appendonly", "no", "--maxmemory", str(20 * MIB)
    ) as server:
        yield server


@pytest.fixture
def small_store(small_redis: RedisServer) -> Iterator[BatchStore]:
    with connect(small_redis.url, "test") as client:
        yield BatchStore(client, ttl_ms=TTL_MS)


#: Requests may take 3 MiB: one chunk of large lines.
ONE_CHUNK = {"WARMQ_HIGH_WATER": "0.15"}


def large_file(path: Path, count: int, characters: int) -> Path:
    return write_lines(path, (chat_line(f"r{n}", "x" * characters) for n in range(count)))


def test_a_finished_window_is_collected_before_the_next_one_asks_for_room(
    small_redis: RedisServer, small_store: BatchStore, tmp_path: Path
) -> None:
    # Given one window in Redis, whose results alone are above the mark, and a run that was killed
    source, out = large_file(tmp_path / "in.jsonl", 1200, 10_000), tmp_path / "out.jsonl"
    with running(small_redis.url, source, out, "--window", "500", **ONE_CHUNK) as process:
        eventually(lambda: any(batch.sealed for batch in windows(small_store)), 20, "one is queued")
        process.send_signal(signal.SIGKILL)
    run_all(small_store, text="y" * 150_000)
    assert len(windows(small_store)) == 1
    assert client_of(small_store).info("memory")["used_memory"] > 12 * MIB
    # When the same command runs again: it is the first to make room
    status, told = served(
        small_redis.url, small_store, source, out, "--window", "500", text="y" * 40_000
    )
    assert status == 0, told
    assert custom_ids(out) == [f"r{n}" for n in range(1200)]
    assert windows(small_store) == []


def test_a_window_that_does_not_fit_ends_where_redis_is_full(
    small_redis: RedisServer, small_store: BatchStore, tmp_path: Path
) -> None:
    # Given one window of the whole file, and requests and results of twice the room each
    source, out = large_file(tmp_path / "in.jsonl", 6000, 4_000), tmp_path / "out.jsonl"
    status, told = served(small_redis.url, small_store, source, out, text="y" * 4_000)
    assert status == 0, told
    assert custom_ids(out) == [f"r{n}" for n in range(6000)]
    assert windows(small_store) == []


def test_a_window_that_ended_early_is_gone_on_with_as_it_was_queued(
    small_redis: RedisServer, small_store: BatchStore, tmp_path: Path
) -> None:
    source, out = large_file(tmp_path / "in.jsonl", 3000, 4_000), tmp_path / "out.jsonl"
    with running(small_redis.url, source, out, **ONE_CHUNK) as process:
        eventually(lambda: any(batch.sealed for batch in windows(small_store)), 20)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    # When it goes on with room for more, and with windows of another size
    status, told = served(small_redis.url, small_store, source, out, "--window", "500")
    assert status == 0, told
    assert custom_ids(out) == [f"r{n}" for n in range(3000)]
    assert windows(small_store) == []


def test_a_redis_that_others_have_filled_is_waited_for_aloud(
    small_redis: RedisServer, small_store: BatchStore, tmp_path: Path
) -> None:
    source, out = large_file(tmp_path / "in.jsonl", 3, 10), tmp_path / "out.jsonl"
    others = [f"somebody:{n}" for n in range(30)]
    for key in others:
        client_of(small_store).set(key, b"x" * (MIB // 2))
    with running(small_redis.url, source, out) as process:
        assert process.stderr is not None
        assert "0 lines done (0 failed), waiting: Redis uses " in process.stderr.readline()
        client_of(small_store).delete(*others)
        eventually(lambda: run_all(small_store) == 3, 20)
        assert process.wait(20) == 0


class FilledOnce(BatchStore):
    """Results fill Redis after the first look for room, and are collected at the second."""

    looks = 0

    def why_full(self, *args: Any, **marks: Any) -> str:
        self.looks += 1
        client_of(self).config_set("maxmemory", 1 if self.looks == 1 else 0)
        return ""

    def batch(self, batch_id: str) -> Batch | None:
        run_all(BatchStore(client_of(self), ttl_ms=TTL_MS))
        return super().batch(batch_id)


def test_a_redis_that_results_fill_while_a_window_begins_is_waited_for(
    small_redis: RedisServer, tmp_path: Path
) -> None:
    source, out = large_file(tmp_path / "in.jsonl", 3, 10), tmp_path / "out.jsonl"
    submission = Submission("run", naming.DEFAULT_QUEUE, 6)
    with connect(small_redis.url, "test") as client, closing(Input(str(source))) as lines:
        store = FilledOnce(client, ttl_ms=TTL_MS)
        run = Run(store, LIMITS, submission, 500, lambda done, waiting: None)
        done = run.run(lines, out, tmp_path / "out.errors.jsonl")
    assert done.completed == 3
    assert store.looks >= 2


def test_a_run_without_a_worker_says_what_it_waits_for(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = large_file(tmp_path / "in.jsonl", 3, 10), tmp_path / "out.jsonl"
    with running(redis_url, source, out) as process:
        assert process.stderr is not None
        told = process.stderr.readline()
    assert "0 of the next 3 requests have ended, no worker serves queue warmq" in told
    assert done_windows(out) == 0


def test_a_run_names_the_requests_that_wait_for_a_dead_workers_leases(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = large_file(tmp_path / "in.jsonl", 3, 10), tmp_path / "out.jsonl"
    with running(redis_url, source, out) as process:
        eventually(lambda: (found := windows(store)) and found[0].sealed, 30)
        Lessee(client_of(store), "celery@dead.7.1").pop(2)
        assert process.stderr is not None
        line = next(one for one in iter(process.stderr.readline, "") if "has died" in one)
    assert "0 of the next 3 requests have ended" in line
    assert "; a worker has died: its 2 requests of queue warmq wait" in line
