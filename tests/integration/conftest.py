"""Two workers, as far as the protocol knows them."""

from __future__ import annotations

import pytest
import redis
from lessee import Lessee


@pytest.fixture
def worker(redis_client: redis.Redis) -> Lessee:
    return Lessee(redis_client, "w1")


@pytest.fixture
def other(redis_client: redis.Redis) -> Lessee:
    return Lessee(redis_client, "w2")
