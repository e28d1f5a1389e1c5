"""Fixtures that all tests share: a private Redis, emptied for each test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest
import redis

from contract.redis.batches import BatchStore
from demo.stack import RedisServer

RESULT_TTL_MS = 60_000

# A virtual machine may stop for seconds; the time of one example shows nothing.
hypothesis.settings.register_profile("warmq", deadline=None)
hypothesis.settings.load_profile("warmq")

# A shell starts background commands with Ctrl-C ignored, and `nohup` has SIGHUP ignored. Children
# inherit that: the processes under test would ignore the signals that tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Return a private redis-server for this test run; tests must not stop it."""
    with RedisServer(tmp_path_factory.mktemp("redis"), "--appendonly", "no") as server:
        yield server


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """Return a client of the private Redis, which is empty."""
    with redis_server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def redis_url(redis_server: RedisServer, redis_client: redis.Redis) -> str:
    """Return the URL of the private Redis, which is empty."""
    return redis_server.url


@pytest.fixture
def store(redis_client: redis.Redis) -> BatchStore:
    """Return the producer's store in the private Redis, which is empty."""
    return BatchStore(redis_client, ttl_ms=RESULT_TTL_MS)
