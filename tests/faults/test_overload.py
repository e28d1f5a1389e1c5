"""More than fits: queues, batches and messages that are too many or too large at once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import redis
from kit.campaigns.mutations import Mutation, changed_root
from kit.commands.support import (
    batch_file,
    chat_line,
    producer_command,
    producer_env,
    run_producer,
    state,
    write_lines,
)
from kit.protocol.lessee import QUEUE, Lessee, celery_message, chat, client_of, stored, submit_batch
from kit.stacks.memory import Watched, growth

from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually

#: Shared machines are slow at times; what waits here has deadlines of its own.
pytestmark = pytest.mark.timeout(200)
MB = 2**20
#: `make memory-full` asks for 10,000.
SMALL_BATCHES = int(os.environ.get("SMALL_BATCHES", "1000"))
TTL_MS = 60_000


@contextmanager
def worker(url: str, folder: Path, **settings: Any) -> Iterator[Worker]:
    """Run a simulated worker for the block."""
    defaults = {
        "engine": "simulated",
        "simulated_slots": 64,
        "simulated_latency_s": 0,
        "lease_s": 10,
    }
    running = Worker(url, folder / "worker.log", **(defaults | settings)).start()
    try:
        yield running
    finally:
        running.kill()


def rss_mb(process: subprocess.Popen[bytes] | None) -> float:
    assert process is not None
    return float(psutil.Process(process.pid).memory_info().rss) / MB


def peak_mb(process: subprocess.Popen[bytes] | None) -> float:
    """Return the most memory a process ever had."""
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def test_submit_waits_visibly_for_a_full_redis_and_a_worker_drains_it_to_the_end(tmp_path: Path):
    lines = [chat_line(f"r{i}", "x" * 3000) for i in range(9000)]
    path = write_lines(tmp_path / "in", lines)
    with RedisServer(tmp_path / "redis", "--maxmemory", "24mb", "--appendonly", "no") as server:
        store = BatchStore(server.client(), ttl_ms=TTL_MS)
        err = tmp_path / "submit.err"
        with err.open("wb") as stderr:
            submit = subprocess.Popen(
                producer_command("submit", path, "--batch-id", "b1"),
                env=producer_env(server.url), stdout=subprocess.DEVNULL, stderr=stderr,
            )  # fmt: skip
        try:
            eventually(
                lambda: b"waiting: Redis uses" in err.read_bytes(), 30, "submit says it waits"
            )
            waiting = state(store, "b1")
            assert waiting.status == "validating"
            assert 0 < waiting.number("total") < 9000
            with worker(server.url, tmp_path):
                assert submit.wait(50) == 0, err.read_text()
                eventually(lambda: state(store, "b1").finished, 40)
        finally:
            submit.kill()
            submit.wait()
        assert state(store, "b1").number("completed") == 9000
        assert client_of(store).info("memory")["used_memory"] < 24 * MB
        done = run_producer("results", "b1", "-o", tmp_path / "out", redis_url=server.url)
        assert done.returncode == 0, done.stderr
        assert len((tmp_path / "out").read_bytes().splitlines()) == 9000
        store.close()


def test_a_worker_stays_the_same_size_whatever_waits_in_the_queue(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, tmp_path: Path
):
    count = 40_000
    path = batch_file(tmp_path / "in", count)
    assert run_producer("submit", path, redis_url=redis_url).returncode == 0
    with worker(redis_url, tmp_path) as running:
        watched = Watched(running, store)
        samples = watched.until(count, every=1000, timeout_s=50)
    assert growth(samples, after=10_000) <= 0.05, samples


def test_many_small_batches_at_once_all_end_and_all_get_their_time_to_live(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
):
    stores = [BatchStore(redis.Redis.from_url(redis_url), ttl_ms=TTL_MS) for _ in range(8)]

    def submit(n: int) -> str:
        submit_batch(stores[n % 8], 5, batch_id=f"small{n}", priority=n % 10)
        return f"small{n}"

    with worker(redis_url, tmp_path), ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(submit, range(SMALL_BATCHES)))
        waiting = set(ids)

        def finished() -> bool:
            waiting.difference_update([i for i in waiting if state(stores[0], i).finished])
            return not waiting

        patience_s = 40 + SMALL_BATCHES / 50
        eventually(finished, patience_s, "all end", 0.5)
        assert {state(stores[0], batch).number("completed") for batch in ids} == {5}
        # One at a time and second, this would take a quarter of an hour.
        eventually(lambda: redis_client.zcard(keys.RETIRING) == 0, patience_s, "all retire", 0.2)
        assert all(redis_client.pttl(keys.batch_key(batch)) > 0 for batch in ids)
    for used in stores:
        used.close()


def test_batches_whose_keys_expired_are_forgotten(redis_client: redis.Redis, store: BatchStore):
    lessee = Lessee(redis_client)
    submit_batch(store, 1, batch_id="alive")
    for n in range(30):
        redis_client.zadd(keys.BATCHES, {f"expired{n}": n})
    for _ in range(200):
        lessee.sweep()
    assert redis_client.zrange(keys.BATCHES, 0, -1) == [b"alive"]


def test_pop_looks_at_no_more_bytes_than_it_may(tmp_path: Path):
    with RedisServer(tmp_path, "--appendonly", "no") as server, server.client() as client:
        message = celery_message("big", chat("x" * (4 * MB)))
        for n in range(40):
            client.lpush(QUEUE, message.replace(b'"big"', b'"b%d"' % n))
        before = peak_mb(server.process)
        lessee = Lessee(client)
        assert len(lessee.pop(100, max_bytes=9 * MB)) == 2
        assert lessee.head[3] == 1, "and says that there is more"
        assert len(lessee.pop(100, max_bytes=1)) == 1, "but one at least"
        # What must not run is looked at within the same bound: 40 of these would take seconds.
        client.zadd(keys.REVOKED, {f"b{n}": 2e9 for n in range(3, 40)})
        assert lessee.pop(100, max_bytes=9 * MB) == []
        assert client.llen(QUEUE) == 35
        assert peak_mb(server.process) < before + 80


def test_messages_of_ten_megabytes_do_not_pile_up_in_the_worker(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
):
    message = celery_message("big", chat("x" * (10 * MB), user="simulate:sleep=0.05"))
    bound: Mutation = ("worker/drain/loop.py", "MAX_IN_FLIGHT_BYTES = 256 * 2**20",
                       f"MAX_IN_FLIGHT_BYTES = {25 * MB}")  # fmt: skip
    with worker(redis_url, tmp_path, root=changed_root(tmp_path, bound)) as running:
        redis_client.lpush(QUEUE, celery_message("first"))
        eventually(lambda: stored(redis_client, "first"), 40)
        before = rss_mb(running.process)
        for n in range(30):
            redis_client.lpush(QUEUE, message.replace(b'"big"', b'"b%d"' % n))
        eventually(
            lambda: all(redis_client.exists(keys.result_key(f"b{n}")) for n in range(30)), 40
        )
        assert peak_mb(running.process) < before + 160  # 300 MB came by


def test_a_line_just_below_the_limit_makes_its_whole_way(redis_url: str, tmp_path: Path):
    lines = [chat_line("big", "y" * (10 * MB - 1000)), chat_line("r1")]
    path = write_lines(tmp_path / "in", lines)
    with worker(redis_url, tmp_path):
        done = run_producer("submit", path, "-o", tmp_path / "out", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    answers = (tmp_path / "out").read_bytes().splitlines()
    assert [orjson.loads(line)["custom_id"] for line in answers] == ["big", "r1"]
