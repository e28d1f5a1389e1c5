"""What a worker logs while Redis takes no writes: a line at the beginning, and one at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from kit.redis_servers.outage import inspect, simulated, stay, store_of, submit_sleepers

from demo.stack import RedisServer, eventually

pytestmark = pytest.mark.timeout(150)
Switch = Callable[[redis.Redis, bool], None]


def without_replicas(client: redis.Redis, on: bool) -> None:
    client.config_set("min-replicas-to-write", int(on))


def demoted(client: redis.Redis, on: bool) -> None:
    if on:
        client.replicaof("127.0.0.1", "1")
    else:
        client.replicaof("NO", "ONE")


@pytest.mark.parametrize(
    ("switch", "word"), [(without_replicas, "min-replicas-to-write"), (demoted, "primary")]
)
def test_refused_writes_are_told_once_at_the_beginning_and_once_at_the_end(
    server: RedisServer, tmp_path: Path, switch: Switch, word: str
) -> None:
    client = server.client()
    with simulated(server.url, tmp_path) as worker:
        log = worker.log_path
        eventually(lambda: " ready in " in log.read_text(), 30, "it is ready")
        assert inspect(server.url)["warmq"]["state"] == "ready"
        before = log.read_text()
        switch(client, True)
        stay(15)
        switch(client, False)
        submit_sleepers(store_of(server), [0.01] * 4)
        eventually(lambda: " is back after " in log.read_text(), 20, "the end is told")
        assert inspect(server.url)["warmq"]["state"] == "ready"
        told = log.read_text().removeprefix(before).splitlines()
        assert worker.stop() == 0
    assert "CRITICAL" not in log.read_text() and "Traceback" not in log.read_text()
    first, last = (line for line in told if "control" not in line)
    assert word in first and "waiting for it" in first
    assert "Redis is back after" in last


def test_a_worker_that_starts_without_a_right_to_write_tells_it_once(
    server: RedisServer, tmp_path: Path
) -> None:
    client = server.client()
    demoted(client, True)
    with simulated(server.url, tmp_path) as worker:
        eventually(lambda: "waiting for it" in worker.log_path.read_text(), 30, "it is told")
        stay(8)
        text = worker.log_path.read_text()
        demoted(client, False)
        assert inspect(server.url)["warmq"]["state"] == "ready"
        assert worker.stop() == 0
    assert "CRITICAL" not in text and "Traceback" not in text
    assert text.count("READONLY") == 1
