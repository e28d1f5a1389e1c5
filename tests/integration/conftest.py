"""Two workers, as far as the protocol knows them; a Redis that is one test's alone; a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
import redis
from kit.protocol.lessee import Lessee
from kit.servers.s3 import credentials, s3_server, there
from obstore.store import from_url

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


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket_environment(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in credentials(s3).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(s3: str, bucket_environment: None) -> Any:
    """Return the bucket, which is empty."""
    store = from_url("s3://warmq")
    for name in there(s3):
        obstore.delete(store, name)
    return store
