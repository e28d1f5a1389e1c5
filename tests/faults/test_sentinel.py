"""Failover: a primary, a replica and three sentinels; the primary dies with work in flight."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from kit.commands.support import batch_file, producer_env, run_producer
from kit.redis_servers.outage import (
    celery_inspect,
    finished,
    in_flight,
    neither_hung_nor_spinning,
    recomputed,
    simulated,
    spread,
    submit_sleepers,
)

from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually, free_port, redis_binary

pytestmark = pytest.mark.timeout(150)

MASTER = "queue"
PASSWORD = "p%2Fw:x"  # as it stands in the URL
PLAIN = "p/w:x"


@dataclass
class Cluster:
    """A replicated Redis and what watches it."""

    servers: list[RedisServer]
    sentinel_ports: list[int]

    @property
    def url(self) -> str:
        """The setting that producer and worker are given."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinel_ports)
        return f"sentinel://:{PASSWORD}@{hosts}/0?master={MASTER}"

    def primary(self) -> tuple[str, int] | None:
        """Return whom the first sentinel holds for the primary."""
        return redis.Redis(port=self.sentinel_ports[0]).sentinel_get_master_addr_by_name(MASTER)

    def replica_in_step(self) -> bool:
        """Say whether the replica has everything."""
        info = self.client(1).info("replication")
        return info["role"] == "slave" and info["master_link_status"] == "up"

    def client(self, index: int) -> redis.Redis:
        """Return a client of one server."""
        return redis.Redis(port=self.servers[index].port, password=PLAIN, socket_timeout=10)


@contextmanager
def sentinel(folder: Path, primary: RedisServer) -> Iterator[int]:
    """Run one sentinel."""
    folder.mkdir()
    port, conf = free_port(), folder / "sentinel.conf"
    conf.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor {MASTER} 127.0.0.1 {primary.port} 2\n"
        f"sentinel auth-pass {MASTER} {PLAIN}\n"
        f"sentinel down-after-milliseconds {MASTER} 1000\n"
        f"sentinel failover-timeout {MASTER} 5000\n"
    )
    with (folder / "sentinel.log").open("wb") as log:
        command = [redis_binary(), str(conf), "--sentinel"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Run primary, replica and three sentinels, until all know of each other."""
    with ExitStack() as stack:
        servers: list[RedisServer] = []
        options = ["--appendonly", "yes", "--requirepass", PLAIN, "--masterauth", PLAIN]
        servers.append(stack.enter_context(RedisServer(tmp_path / "r0", *options)))
        options += ["--replicaof", "127.0.0.1", str(servers[0].port)]
        servers.append(stack.enter_context(RedisServer(tmp_path / "r1", *options)))
        ports = [stack.enter_context(sentinel(tmp_path / f"s{n}", servers[0])) for n in range(3)]
        cluster = Cluster(servers, ports)
        eventually(cluster.replica_in_step, 20, "the replica is in step")
        for port in ports:
            eventually(lambda port=port: all_known(port), 30, "the sentinels know each other")
        yield cluster


def all_known(port: int) -> bool:
    """Say whether a sentinel knows the replica and both other sentinels."""
    state = redis.Redis(port=port).sentinel_master(MASTER)
    return state["num-slaves"] == 1 and state["num-other-sentinels"] == 2


def operator_env(cluster: Cluster) -> dict[str, str]:
    """Return the environment of an operator's commands."""
    return producer_env(cluster.url, WARMQ_ENGINE="simulated")


def answers(cluster: Cluster, worker: Worker) -> bool:
    """Say whether Celery's control commands reach the worker, and its secrets stay its own."""
    assert worker.process is not None and worker.process.poll() is None
    env = operator_env(cluster)
    done = celery_inspect(env, "stats", "--timeout", "3", "--json", of=worker)
    assert PASSWORD not in done.stdout + done.stderr
    assert PLAIN not in done.stdout + done.stderr
    return done.returncode == 0 and '"state": "ready"' in done.stdout


def test_a_failover_with_work_in_flight_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    store = BatchStore.open(cluster.url, "test", ttl_ms=600_000)
    with simulated(cluster.url, tmp_path) as worker:
        submitted, _ = submit_sleepers(store, spread(128, 1, 10))
        in_flight(tmp_path, 128)
        assert answers(cluster, worker)
        eventually(cluster.replica_in_step, 20, "the replica is in step")
        old = cluster.primary()
        with neither_hung_nor_spinning(worker):
            cluster.servers[0].stop(signal.SIGKILL)
            eventually(lambda: cluster.primary() != old, 40, "the sentinels have decided")
            batch = finished(store, submitted.id)
        assert batch.number("completed") == 128
        ended = cluster.client(1).lrange(keys.batch_key("b1", "finished"), 0, -1)
        assert len(ended) == len(set(ended)) == 128
        # A write that only the dead primary knew is done again: no more than it had just taken.
        assert recomputed(tmp_path) <= 4
        eventually(lambda: answers(cluster, worker), 60, "control commands work again")
        assert worker.stop() == 0
    text = (tmp_path / "worker.log").read_text()
    assert PASSWORD not in text and PLAIN not in text


@pytest.mark.slow
def test_the_command_line_finds_the_primary_before_and_after(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 50)
    first = run_producer("submit", file, "--batch-id", "b1", redis_url=cluster.url)
    assert first.returncode == 0, first.stderr
    eventually(cluster.replica_in_step, 20, "the replica is in step")
    old = cluster.primary()
    cluster.servers[0].stop(signal.SIGKILL)
    eventually(lambda: cluster.primary() != old, 40, "the sentinels have decided")
    with simulated(cluster.url, tmp_path, simulated_latency_s=0.01):
        again = run_producer("submit", file, "--batch-id", "b1", "--wait", redis_url=cluster.url)
    assert again.returncode == 0, again.stderr
    assert "50 completed" in again.stderr
