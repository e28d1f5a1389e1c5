"""Each script that ends work, frees memory or helps is run in a Redis that is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis
from kit.protocol.full_redis_gateway import CASES
from kit.protocol.lessee import Lessee

from contract.redis.batches import BatchStore
from contract.redis.scripts import PACKAGES, SHARED, sha
from demo.stack import ROOT

FOLDERS = [ROOT / side / "lua" for side in PACKAGES]
SCRIPTS = {path.stem for folder in FOLDERS for path in folder.iterdir()} - set(SHARED)
#: What a full Redis refuses: each begins something new. What `know` does not note is computed
#: again.
REFUSED = {"create", "enqueue", "enqueue_planned", "know", "reserve", "response_create"}
GROWS = ("SET x y", "HSET x y z", "ZADD x 1 y", "LPUSH x y", "SADD x y", "XADD x * y z")


@pytest.fixture
def fill(redis_client: redis.Redis) -> Iterator[Callable[[], None]]:
    """Return a function that makes Redis refuse what may grow its memory, and forget scripts."""

    def run() -> None:
        redis_client.script_flush()
        redis_client.config_set("maxmemory", redis_client.info("memory")["used_memory"] // 2)
        for command in GROWS:
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                redis_client.execute_command(*command.split())

    yield run
    redis_client.config_set("maxmemory", 0)


@pytest.mark.parametrize("script", sorted(SCRIPTS - REFUSED))
def test_it_works_in_a_full_redis(
    script: str, redis_client: redis.Redis, redis_url: str, store: BatchStore, worker: Lessee,
    fill: Callable[[], None],
) -> None:  # fmt: skip
    act = CASES[script](store, worker, redis_url)
    fill()
    act()
    assert redis_client.script_exists(sha(script)) == [True], f"{script} was not run"


def test_no_case_is_of_a_script_that_is_gone() -> None:
    assert CASES.keys() == SCRIPTS - REFUSED
