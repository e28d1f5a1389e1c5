"""Redis is there and refuses: full, read-only, loading. Results are kept; nothing is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import redis
from celery import Celery
from kit.commands.support import batch_file, run_producer
from kit.protocol.lessee import chat, submit_batch
from kit.redis_servers.outage import (
    assert_settled,
    finished,
    in_flight,
    inspect,
    neither_hung_nor_spinning,
    recomputed,
    simulated,
    spread,
    starts,
    stay,
    store_of,
    submit_sleepers,
)

from contract import naming
from contract.redis.reads import Reads
from demo.stack import RedisServer, eventually

pytestmark = pytest.mark.timeout(150)

FULL = r"OOM|maxmemory"


def fill(client: redis.Redis) -> None:
    """Fill Redis beyond its limit, so that it stays full whatever is freed meanwhile."""
    for n in range(64):
        client.set(f"ballast:{n}", b"x" * 2**17, ex=3600)
    client.config_set("maxmemory", "4mb")
    with pytest.raises(redis.ResponseError, match=FULL):
        client.set("more", b"x")


def test_a_full_redis_is_drained_to_its_end(server: RedisServer, tmp_path: Path) -> None:
    """OOM at POP, at DONE and at Celery's own start: what is queued is computed and committed."""
    store, client = store_of(server), server.client()
    submitted, bodies = submit_sleepers(store, spread(64, 0.01, 1))
    fill(client)
    with simulated(server.url, tmp_path, simulated_slots=16) as worker:
        finished(store, submitted.id)
        with pytest.raises(redis.ResponseError, match=FULL):
            client.set("more", b"x")
        Celery("client", broker=server.url).control.broadcast("ping")
        client.config_set("maxmemory", 0)
        assert inspect(server.url)["warmq"]["state"] == "ready"
        assert worker.stop() == 0
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


@pytest.mark.slow
def test_a_redis_that_fills_up_while_requests_run_takes_their_results(
    server: RedisServer, tmp_path: Path
) -> None:
    store, client = store_of(server), server.client()
    with simulated(server.url, tmp_path) as worker:
        submitted, bodies = submit_sleepers(store, spread(64, 2, 4))
        in_flight(tmp_path, 64)
        fill(client)
        finished(store, submitted.id)
        client.config_set("maxmemory", 0)
        second, more = submit_sleepers(store, [0.01] * 8, "b2")
        finished(store, second.id)
        assert inspect(server.url)["warmq"]["state"] == "ready"
        assert worker.stop() == 0
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)
    assert_settled(store, second, more)


def test_submit_to_a_full_redis_says_so_and_goes_on_later(
    server: RedisServer, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 100)
    client = server.client()
    fill(client)
    refused = run_producer("submit", file, "--batch-id", "b1", redis_url=server.url)
    assert refused.returncode == 3
    assert "Redis is full" in refused.stderr
    assert "--batch-id b1" in refused.stderr
    client.config_set("maxmemory", 0)
    again = run_producer("submit", file, "--batch-id", "b1", redis_url=server.url)
    assert again.returncode == 0, again.stderr
    assert sum(Reads(client).queue_lengths(naming.DEFAULT_QUEUE).values()) == 100


def test_a_primary_that_becomes_read_only_gets_the_results_when_it_may_write_again(
    server: RedisServer, tmp_path: Path
) -> None:
    store, client = store_of(server), server.client()
    with RedisServer(tmp_path / "other") as other, simulated(server.url, tmp_path) as worker:
        submitted, bodies = submit_sleepers(store, spread(64, 1, 4))
        in_flight(tmp_path, 64)
        # Its copy of us makes the other server a replica in turn of what we will be.
        other.client().replicaof("127.0.0.1", str(server.port))
        eventually(lambda: in_step(other), 15, "the other server has a copy")
        other.client().replicaof("NO", "ONE")
        with neither_hung_nor_spinning(worker):
            client.replicaof("127.0.0.1", str(other.port))
            stay(5)
            client.replicaof("NO", "ONE")
            finished(store, submitted.id)
        assert inspect(server.url)["warmq"]["state"] == "ready"
        assert worker.stop() == 0
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


def in_step(server: RedisServer) -> bool:
    """Say whether a replica has its primary's data."""
    info = server.client().info("replication")
    return info["role"] == "slave" and info["master_link_status"] == "up"


def test_a_redis_that_still_loads_its_data_is_waited_for(
    server: RedisServer, tmp_path: Path
) -> None:
    store, client = store_of(server), server.client()
    # 250 us a command while loading, so that it answers LOADING for about 3 s.
    pipe = client.pipeline(transaction=False)
    for n in range(12000):
        pipe.set(f"ballast:{n}", "x" * 100, ex=3600)
    pipe.execute()
    with simulated(server.url, tmp_path) as worker:
        submitted, bodies = submit_sleepers(store, spread(64, 1, 4))
        in_flight(tmp_path, 64)
        with neither_hung_nor_spinning(worker):
            server.stop()
            server.start("--key-load-delay", "250", wait=False)
            finished(store, submitted.id)
        assert b"loading" in worker.log_path.read_bytes()
        assert inspect(server.url)["warmq"]["state"] == "ready"
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


def test_a_redis_that_lost_its_last_writes_loses_no_request(tmp_path: Path) -> None:
    """Started again from a snapshot that knows of no lease: requests are computed again, once."""
    with RedisServer(tmp_path / "redis", "--appendonly", "no") as server:
        store = store_of(server)
        # The first half ends at once, so that leases are given anew while older ones run.
        bodies = [chat(f"q{n}", user=f"simulate:sleep={0.01 if n < 24 else 4}") for n in range(48)]
        submitted = submit_batch(store, bodies=bodies)
        server.client().save()
        with simulated(server.url, tmp_path, simulated_slots=24):
            eventually(lambda: sum(starts(tmp_path).values()) >= 48, 30, "all have begun")
            eventually(lambda: len(store.finished_ids("b1", 0, 100)) == 24, 30, "half is done")
            server.stop(signal.SIGKILL)
            server.start()
            assert store.finished_ids("b1", 0, 100) == []
            finished(store, submitted.id)
        assert_settled(store, submitted, bodies)
