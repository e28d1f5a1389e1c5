"""Leases that are renewed many at a time: each has an answer of its own."""

from __future__ import annotations

import pytest
import redis

from contract.errors import StoreRefused
from contract.redis.batches import BatchStore
from contract.redis.due import Due


@pytest.fixture
def due(store: BatchStore) -> Due:
    made = Due.using(store)
    for n in range(20):
        made.add("webhook", f"w{n}")
    return made


def test_those_that_another_one_has_are_told_also_by_a_redis_that_has_forgotten_the_script(
    due: Due, redis_client: redis.Redis
) -> None:
    claims = due.claim("webhook", 60_000, 20)
    assert due.release(claims[3], 0)
    for _ in range(2):
        redis_client.script_flush()
        assert due.renew(claims, 60_000) == [n != 3 for n in range(20)]
    assert due.renew([], 60_000) == []


def test_what_redis_refuses_is_an_error_in_its_own_words(
    due: Due, redis_client: redis.Redis
) -> None:
    claims = due.claim("webhook", 60_000, 20)
    redis_client.set("warmq:gateway:due:webhook:held", "another program's")
    with pytest.raises(StoreRefused, match=r"^Redis: (Error running script|WRONGTYPE)"):
        due.renew(claims, 60_000)
