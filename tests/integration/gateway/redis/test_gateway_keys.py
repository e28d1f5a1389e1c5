"""Keys, rates and budgets of the gateways' callers in Redis, with two gateways at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis

from contract.redis.batches import BatchStore
from contract.redis.objects import Objects
from demo.stack import RedisServer, eventually
from gateway.redis.api_keys import KEYS, ApiKeys, KeyLookup, digest_of
from gateway.redis.async_calls import CallCombiner
from gateway.redis.limits import GRACE_MS, Budgets, Rates, Take


@pytest.fixture
def keys(store: BatchStore) -> ApiKeys:
    return ApiKeys.using(store)


@pytest.fixture
def budgets(store: BatchStore) -> Budgets:
    return Budgets.using(store)


@pytest.fixture
async def rates(redis_url: str) -> AsyncIterator[Rates]:
    found = Rates.open(redis_url, "test")
    yield found
    await found.close()


# -- keys -----------------------------------------------------------------------------


def test_redis_holds_no_key_but_its_digest(keys: ApiKeys, redis_client: redis.Redis) -> None:
    secret, key = keys.create("a", name="ci", tokens_per_minute=5)
    assert secret.startswith("sk-")
    assert len(secret) >= 3 + 43  # 32 bytes in base64
    held = redis_client.hgetall(KEYS)
    assert list(held) == [digest_of(secret).encode()]
    assert secret.encode() not in b"".join(held.values())
    assert key.tail == secret[-4:]
    assert keys.all() == [key]
    assert keys.get(key.id) == key


def test_no_two_keys_are_alike(keys: ApiKeys) -> None:
    assert len({keys.create("a")[0] for _ in range(50)}) == 50


async def test_a_key_is_found_by_its_digest_until_it_is_revoked(
    keys: ApiKeys, redis_url: str
) -> None:
    lookup = KeyLookup.open(redis_url, "test")
    assert await lookup.find([digest_of("sk-x")]) == [(None, False)]
    secret, key = keys.create("a", models=("m1",), highest_priority=3)
    assert await lookup.find([digest_of(secret), digest_of("sk-x")]) == [(key, True), (None, True)]
    revoked = keys.revoke(key.id)
    assert revoked is not None
    assert revoked.revoked_at
    assert keys.revoke(key.id) == revoked  # the first time stays
    assert await lookup.find([digest_of(secret)]) == [(None, True)]
    assert keys.revoke("key_other") is None
    assert keys.any()
    await lookup.close()


async def test_questions_asked_at_once_are_one_command_and_an_error_is_everybodys() -> None:
    calls: list[list[int]] = []

    async def ask(numbers: list[int]) -> list[int]:
        calls.append(numbers)
        await asyncio.sleep(0)
        if 13 in numbers:
            raise ValueError("thirteen")
        return [2 * n for n in numbers]

    gathering = CallCombiner(ask, most=4)
    assert await asyncio.gather(*(gathering.put(n) for n in range(6))) == [0, 2, 4, 6, 8, 10]
    assert calls == [[0, 1, 2, 3], [4, 5]]
    both = [gathering.put(13), gathering.put(1)]
    assert all(
        isinstance(e, ValueError) for e in await asyncio.gather(*both, return_exceptions=True)
    )
    assert await gathering.put(1) == 2


# -- rates ----------------------------------------------------------------------------


async def test_a_key_has_its_requests_of_a_minute_and_then_waits(rates: Rates) -> None:
    take = Take("k", 3, None, 1, 0)
    first, *_, third, fourth = await rates.take([take] * 4)
    assert (first.allowed, first.requests_left) == (True, 2)
    assert (third.allowed, third.requests_left) == (True, 0)
    assert not fourth.allowed
    assert 19_000 < fourth.wait_ms <= 20_000  # a third of a minute
    assert fourth.requests_full_ms > 59_000


async def test_tokens_are_taken_and_corrected(rates: Rates) -> None:
    (taken,) = await rates.take([Take("k", None, 1000, 1, 600)])
    assert (taken.allowed, taken.tokens_left) == (True, 400)
    (refused,) = await rates.take([Take("k", None, 1000, 1, 600)])
    assert not refused.allowed
    assert 11_000 < refused.wait_ms <= 12_000
    assert refused.tokens_left == pytest.approx(400, abs=5)  # nothing was taken
    await rates.take([Take("k", None, 1000, 0, 50 - 600)])  # it used 50 and not 600
    (again,) = await rates.take([Take("k", None, 1000, 1, 600)])
    assert again.allowed
    assert again.tokens_left == pytest.approx(350, abs=5)


async def test_what_used_more_than_its_estimate_is_paid_for_later(rates: Rates) -> None:
    await rates.take([Take("k", None, 600, 1, 10), Take("k", None, 600, 0, 1190)])
    (refused,) = await rates.take([Take("k", None, 600, 1, 1)])
    assert not refused.allowed
    assert refused.tokens_left == 0
    assert 59_000 < refused.wait_ms < 61_000


async def test_what_can_never_fit_says_so(rates: Rates) -> None:
    (refused,) = await rates.take([Take("k", 10, 100, 1, 101)])
    assert (refused.allowed, refused.wait_ms, refused.requests_left) == (False, -1, 10)


async def test_a_refused_request_takes_of_neither(rates: Rates) -> None:
    await rates.take([Take("k", 10, 100, 1, 100), Take("k", 10, 100, 1, 100)])
    (last,) = await rates.take([Take("k", 10, 100, 1, 0)])
    assert last.requests_left == 8


async def test_buckets_of_two_keys_are_apart_and_fill_again(rates: Rates) -> None:
    await rates.take([Take("a", 60_000, None, 1, 0)] * 100)
    before = (await rates.take([Take("a", 60_000, None, 1, 0)]))[0].requests_left
    (other,) = await rates.take([Take("b", 60_000, None, 1, 0)])
    assert other.requests_left == 59_999
    await asyncio.sleep(0.2)  # a thousand a second come back
    (after,) = await rates.take([Take("a", 60_000, None, 1, 0)])
    assert after.requests_left > before


async def test_a_bucket_goes_when_it_is_full_and_not_before(
    rates: Rates, redis_client: redis.Redis
) -> None:
    await rates.take([Take("k", 60, None, 1, 0)])
    ttl = redis_client.pttl("warmq:gateway:rate:k")
    assert 1000 <= ttl <= 2000  # one request of sixty is back in a second
    await rates.take([Take("k", 60, None, 1, 0)] * 59)
    assert redis_client.pttl("warmq:gateway:rate:k") > 59_000


async def test_two_gateways_share_one_key(rates: Rates, redis_url: str) -> None:
    other = Rates.open(redis_url, "other")
    rows = await asyncio.gather(
        *(each.take([Take("k", 100, None, 1, 0)] * 10) for each in (rates, other) for _ in range(8))
    )
    assert sum(taken.allowed for row in rows for taken in row) == 100
    await other.close()


# -- tokens of batches ------------------------------------------------------------------


def test_a_batch_holds_tokens_until_it_gives_them_back(budgets: Budgets) -> None:
    assert budgets.reserve("t", "b1", {"m": 60, "n": 10}, 100) is None
    assert budgets.enqueued("t") == {"m": 60, "n": 10}
    refused = budgets.reserve("t", "b2", {"n": 10, "m": 41}, 100)
    assert refused is not None
    assert (refused.model, refused.held) == ("m", 60)
    assert budgets.enqueued("t") == {"m": 60, "n": 10}
    assert budgets.reserve("other", "b3", {"m": 100}, 100) is None  # its own budget
    assert budgets.give_back("b1")
    assert not budgets.give_back("b1")
    assert budgets.enqueued("t") == {}


def test_a_retry_holds_nothing_twice(budgets: Budgets, redis_client: redis.Redis) -> None:
    for _ in range(5):
        assert budgets.reserve("t", "b1", {"m": 60}, 100) is None
    assert budgets.enqueued("t") == {"m": 60}
    assert budgets.reserve("t", "b1", {"": 90}, 100) is None  # in place of it
    assert budgets.enqueued("t") == {"": 90}
    budgets.give_back("b1")
    assert not list(redis_client.scan_iter("warmq:gateway:*"))


def test_what_is_in_use_has_no_time_to_live(budgets: Budgets, redis_client: redis.Redis) -> None:
    budgets.reserve("t", "b1", {"m": 60}, 100)
    budgets.note_bytes("t", "file-1", 5, None)
    found = list(redis_client.scan_iter("warmq:gateway:*"))
    assert len(found) == 6
    assert all(redis_client.ttl(key) == -1 for key in found)


def test_two_gateways_never_reserve_more_than_there_is(budgets: Budgets, redis_url: str) -> None:
    stores = [Budgets.using(BatchStore.open(redis_url, "x", ttl_ms=1)) for _ in range(2)]

    def reserve(n: int) -> bool:
        return stores[n % 2].reserve("t", f"b{n}", {"m": 10}, 100) is None

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(reserve, range(40))) == 10
        for store in stores:
            list(pool.map(store.give_back, (f"b{n}" for n in range(40))))
    assert budgets.enqueued("t") == {}
    for store in stores:
        store.close()


def test_what_a_crash_left_is_given_back(
    budgets: Budgets, store: BatchStore, redis_client: redis.Redis
) -> None:
    objects = Objects.using(store)
    states = {"gone": None, "done": "completed", "runs": "in_progress", "new": None}
    for name, status in states.items():
        budgets.reserve("t", name, {"m": 10}, None)
        if status:
            objects.create("batch", "t", name, 1, orjson.dumps({"status": status}))
        if name != "new":
            age(redis_client, name)
    assert budgets.give_back_of_ended("t") == 2
    assert redis_client.hkeys("warmq:gateway:reserved:t") == [b"runs", b"new"]
    assert budgets.enqueued("t") == {"m": 20}


def age(client: redis.Redis, batch_id: str) -> None:
    """Make a reservation older than a batch's creation may take."""
    note: Any = orjson.loads(client.hget("warmq:gateway:reserved:t", batch_id) or b"")
    note["at"] -= GRACE_MS
    client.hset("warmq:gateway:reserved:t", batch_id, orjson.dumps(note))


# -- bytes of files -----------------------------------------------------------------------


def test_bytes_are_counted_once_for_each_file(budgets: Budgets, redis_client: redis.Redis) -> None:
    for _ in range(3):
        assert budgets.note_bytes("t", "file-1", 60, 100) is None
    assert budgets.stored_bytes("t") == 60
    refused = budgets.note_bytes("t", "file-2", 41, 100)
    assert refused is not None
    assert refused.held == 60
    assert budgets.note_bytes("t", "file-2", 40, 100) is None
    budgets.note_bytes("t", "file-1", 0, None)
    budgets.note_bytes("t", "file-1", 0, None)
    assert budgets.stored_bytes("t") == 40
    for _ in range(2):
        budgets.note_bytes("", "file-2", 0, None)  # whose it was is not known any more
    assert budgets.stored_bytes("t") == 0
    assert not list(redis_client.scan_iter("warmq:gateway:*"))


def test_files_that_have_expired_count_no_more(
    budgets: Budgets, store: BatchStore, redis_client: redis.Redis
) -> None:
    objects = Objects.using(store)
    ends = int(time.time()) + 1
    objects.create("file", "t", "file-1", 1, b"{}", expires_at=ends)
    objects.create("file", "t", "file-2", 1, b"{}")
    for name in ("file-1", "file-2"):
        budgets.note_bytes("t", name, 10, None)
    eventually(lambda: objects.get("file", "t", "file-1") is None, 10, "the file has expired")
    assert budgets.forget_files_that_have_gone("t") == 0  # it may yet be created
    redis_client.hset("warmq:gateway:stored:t", "file-1", "10 0")
    assert budgets.forget_files_that_have_gone("t") == 1
    assert budgets.stored_bytes("t") == 10


async def test_a_restart_of_redis_is_ridden_out(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        lookup = KeyLookup.open(server.url, "test")
        assert not (await lookup.find(["d"]))[0].any_keys
        server.stop()
        server.start()
        assert not (await lookup.find(["d"]))[0].any_keys  # its connection is stale
        await lookup.close()
