"""What lies between a worker or producer and Redis: late, cut, half-open, lost replies."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.commands.support import batch_file, producer_command, producer_env
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
from kit.redis_servers.proxy import Fault, Proxy

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.reads import Reads
from contract.redis.scripts import source
from demo.stack import RedisServer, eventually

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    """Return a proxy in front of it; the test itself looks at Redis directly."""
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def store(server: RedisServer) -> BatchStore:
    """Return the producer's store, not behind the proxy."""
    return store_of(server)


def sha_of(server: RedisServer, script: str) -> bytes:
    """Return the SHA by which a script is called."""
    return str(server.client().script_load(source(script))).encode()


@pytest.mark.slow
def test_a_pop_whose_reply_is_lost_loses_no_message(
    server: RedisServer, proxy: Proxy, store: BatchStore, tmp_path: Path
) -> None:
    with simulated(proxy.url, tmp_path, lease_s=6):
        eventually(lambda: server.client().hlen(keys.WORKERS), 30, "the worker is there")
        proxy.drop_reply(sha_of(server, "pop"))
        submitted, bodies = submit_sleepers(store, [0.05] * 40)
        assert proxy.dropped.wait(20)
        finished(store, submitted.id)
        # Where messages were leased by the lost reply, RENEW has handed them back.
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


def test_pops_whose_replies_are_lost_in_a_row_lose_no_message(
    server: RedisServer, proxy: Proxy, store: BatchStore, tmp_path: Path
) -> None:
    submitted, bodies = submit_sleepers(store, [0.05] * 40)
    for _ in range(3):
        proxy.drop_reply(sha_of(server, "pop"))
    with simulated(proxy.url, tmp_path, lease_s=6) as worker:
        eventually(lambda: b"POP reply was lost" in worker.log_path.read_bytes(), 30, "handed back")
        finished(store, submitted.id)
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


def test_a_done_whose_reply_is_lost_counts_once(
    server: RedisServer, proxy: Proxy, store: BatchStore, tmp_path: Path
) -> None:
    with simulated(proxy.url, tmp_path):
        submitted, bodies = submit_sleepers(store, spread(40, 1, 2))
        in_flight(tmp_path, 40)
        proxy.drop_reply(sha_of(server, "done"))
        assert proxy.dropped.wait(20)
        finished(store, submitted.id)
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


@pytest.mark.slow
def test_connections_reset_again_and_again_cost_nothing(
    proxy: Proxy, store: BatchStore, tmp_path: Path
) -> None:
    with simulated(proxy.url, tmp_path) as worker:
        submitted, bodies = submit_sleepers(store, spread(64, 0.5, 4))
        in_flight(tmp_path, 64)
        with neither_hung_nor_spinning(worker):
            for _ in range(6):
                proxy.reset()
                stay(0.5)
            finished(store, submitted.id)
        assert inspect(proxy.url)["warmq"]["state"] == "ready"
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


def test_replies_cut_short_cost_nothing(proxy: Proxy, store: BatchStore, tmp_path: Path) -> None:
    with simulated(proxy.url, tmp_path) as worker:
        submitted, bodies = submit_sleepers(store, spread(64, 0.5, 4))
        in_flight(tmp_path, 64)
        with neither_hung_nor_spinning(worker):
            for length in (1, 7, 64):
                proxy.fault = Fault(truncate_after=length)
                proxy.reset()
                stay(1)
            proxy.fault = Fault()
            proxy.reset()
            finished(store, submitted.id)
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


@pytest.mark.slow
def test_late_replies_slow_down_and_break_nothing(
    proxy: Proxy, store: BatchStore, tmp_path: Path
) -> None:
    proxy.fault = Fault(delay_s=0.3)
    with simulated(proxy.url, tmp_path, simulated_slots=16):
        submitted, bodies = submit_sleepers(store, [0.05] * 48)
        finished(store, submitted.id)
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


def test_half_open_connections_are_given_up_before_the_lease_ends(
    server: RedisServer, proxy: Proxy, store: BatchStore, tmp_path: Path
) -> None:
    # A neighbour whose way is clear would take leases that run out.
    neighbour = simulated(server.url, tmp_path, "neighbour", lease_s=9)
    with neighbour, simulated(proxy.url, tmp_path, lease_s=9) as worker:
        submitted, bodies = submit_sleepers(store, spread(512, 1, 12))
        in_flight(tmp_path, 512)
        with neither_hung_nor_spinning(worker):
            proxy.fault = Fault(swallow=True)
            stay(3)
            # What was connected stays deaf; only new connections work.
            proxy.fault = Fault()
            finished(store, submitted.id)
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


@pytest.mark.slow
def test_a_worker_whose_connections_are_deaf_still_stops_in_time(
    proxy: Proxy, store: BatchStore, tmp_path: Path
) -> None:
    with simulated(proxy.url, tmp_path, drain_timeout_s=1) as worker:
        submit_sleepers(store, [600] * 4)
        in_flight(tmp_path, 4)
        proxy.fault = Fault(swallow=True)
        # 1 s to drain, 5 s for the last writes, 5 s for Celery's own connection.
        assert worker.stop(timeout_s=40) == 1, "the leases could not be handed back"


def test_a_deaf_cancel_channel_is_noticed(
    server: RedisServer, proxy: Proxy, store: BatchStore, tmp_path: Path
) -> None:
    with simulated(proxy.url, tmp_path, lease_s=6):
        submitted, _ = submit_sleepers(store, [600] * 4)
        in_flight(tmp_path, 4)
        (listener,) = (
            c
            for c in server.client().client_list()
            if c["name"].startswith("warmq-") and c["sub"] != "0"
        )
        proxy.deafen(int(listener["addr"].rpartition(":")[2]))
        assert store.cancel(submitted.batch) == 4
        client = server.client()
        eventually(lambda: not client.zcard(keys.LEASES), 30, "the work is aborted")
    assert finished(store, submitted.id).number("cancelled") == 4


def test_junk_on_the_cancel_channels_stops_no_worker(
    server: RedisServer, store: BatchStore, tmp_path: Path
) -> None:
    client = server.client()
    with simulated(server.url, tmp_path) as worker:
        eventually(lambda: client.pubsub_numsub(keys.CANCEL_CHANNEL)[0][1], 30, "subscribed")
        for junk in (b"", b"\xff", b"{", b"7", b"null", b"[[1]]", b'{"a": 1}'):
            for channel in (keys.CANCEL_CHANNEL, keys.BATCH_CANCEL_CHANNEL):
                client.publish(channel, junk)
        submitted, bodies = submit_sleepers(store, [0.05] * 4)
        finished(store, submitted.id)
        assert worker.stop() == 0
    assert_settled(store, submitted, bodies)


def test_a_store_is_found_behind_a_first_connection_that_is_reset(proxy: Proxy) -> None:
    proxy.drop_reply(b"PING")
    store = BatchStore.open(proxy.url, "test", ttl_ms=60_000)
    assert proxy.dropped.is_set()
    store.close()


@pytest.mark.parametrize("script", ["create", "enqueue", "seal"])
def test_a_submit_whose_reply_is_lost_queues_every_line_once(
    script: str, server: RedisServer, proxy: Proxy, store: BatchStore, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 1200)
    proxy.drop_reply(sha_of(server, script))
    done = subprocess.run(
        producer_command("submit", file, "--batch-id", "b1"), env=producer_env(proxy.url),
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert proxy.dropped.is_set()
    assert done.returncode == 0, done.stderr
    waiting = Reads(server.client()).queue_lengths(naming.DEFAULT_QUEUE)
    assert sum(waiting.values()) == 1200
    batch = store.batch("b1")
    assert batch is not None and batch.sealed and batch.number("total") == 1200


def test_a_submit_through_a_connection_that_breaks_queues_every_line_once(
    server: RedisServer, proxy: Proxy, store: BatchStore, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 5000)
    command = producer_command("submit", file, "--batch-id", "b1")
    with simulated(server.url, tmp_path, simulated_slots=64, simulated_latency_s=0.001):
        proxy.fault = Fault(delay_s=0.02)
        with subprocess.Popen(
            command, env=producer_env(proxy.url), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as submit:
            while submit.poll() is None:
                proxy.reset()
                stay(0.2)
            assert submit.stderr is not None
            told = submit.stderr.read()
        if submit.returncode:  # out of patience: the same command goes on
            assert submit.returncode == 3, told
            again = subprocess.run(
                command, env=producer_env(server.url), capture_output=True, timeout=50, check=False
            )
            assert again.returncode == 0, again.stderr
        finished(store, "b1")
    assert sum(starts(tmp_path).values()) == len(starts(tmp_path)) == 5000
