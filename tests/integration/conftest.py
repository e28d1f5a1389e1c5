"""Two workers, as far as the protocol knows them; a Redis that is one test's alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from lessee import Lessee

from contract.redis.batches import BatchStore
from demo.stack import RedisServer


@pytest.fixture
def worker(redis_client: redis.Redis) -> Lessee:
    return Lessee(redis_client, "w1")


@pytest.fixture
def other(redis_client: redis.Redis) -> Lessee:
    return Lessee(redis_client, "w2")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis whose settings a test may change: append-only file, 1 GiB, no eviction."""
    with RedisServer(tmp_path / "redis", "--appendonly", "yes", "--maxmemory", "1gb") as server:
        yield server


@pytest.fixture
def own_store(own: RedisServer) -> BatchStore:
    """Return the producer's store in that Redis."""
    return BatchStore(own.client(), ttl_ms=60_000)
