"""TLS between worker, producer, Celery's control commands and Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.commands.support import batch_file, producer_env, run_producer
from kit.redis_servers.debian_redis import Authority, TlsRedis
from kit.redis_servers.outage import (
    assert_settled,
    celery_inspect,
    finished,
    simulated,
    submit_sleepers,
)

from contract.redis.batches import BatchStore
from demo.stack import eventually

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TlsRedis]:
    """Return a Redis that speaks TLS only."""
    with TlsRedis(tmp_path / "redis") as server:
        yield server


def test_worker_producer_and_control_commands_speak_tls(server: TlsRedis, tmp_path: Path) -> None:
    store = BatchStore(server.client(), ttl_ms=60_000)
    url = server.secure_url
    with simulated(url, tmp_path) as worker:
        submitted, bodies = submit_sleepers(store, [0.01] * 20)
        finished(store, submitted.id)
        # One hears of messages, one of online requests.
        eventually(lambda: server.client().info("clients")["tracking_clients"] == 2, 10, "two")
        file = batch_file(tmp_path / "in.jsonl", 20)
        done = run_producer("submit", file, "-o", tmp_path / "out.jsonl", redis_url=url)
        assert done.returncode == 0, done.stderr
        assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 20
        env = producer_env(url, WARMQ_ENGINE="simulated")
        told = eventually(
            lambda: (
                (r := celery_inspect(env, "stats", "--timeout", "3", of=worker)).returncode == 0
                and r
            ),
            30,
            "inspect answers",
        )
        assert "ready" in told.stdout
        assert worker.stop() == 0
    assert_settled(store, submitted, bodies)


def test_a_server_that_another_authority_vouches_for_is_not_trusted(
    server: TlsRedis, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    file = batch_file(tmp_path / "in.jsonl", 1)
    url = f"rediss://127.0.0.1:{server.port}/0"
    for query in (f"?ssl_ca_certs={other.ca}", ""):
        refused = run_producer("submit", file, redis_url=url + query)
        assert refused.returncode == 3
        assert "certificate" in refused.stderr.lower()
    # Left to itself Celery would not check anything for a URL without options.
    asked = celery_inspect(producer_env(url, WARMQ_ENGINE="simulated"), "ping", "--timeout", "2")
    assert asked.returncode != 0
    assert "certificate" in (asked.stdout + asked.stderr).lower()


def test_a_plain_connection_to_a_tls_port_fails_with_a_plain_message(
    server: TlsRedis, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 1)
    refused = run_producer("submit", file, redis_url=server.url)
    assert refused.returncode == 3
    assert "Traceback" not in refused.stderr
