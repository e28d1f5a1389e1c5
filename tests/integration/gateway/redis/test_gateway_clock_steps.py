"""Redis' clock steps back under gateways: what was due waits no longer for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from kit.redis_servers.wrong_clock import WrongClock, compiler

from contract.redis.batches import BatchStore
from contract.redis.connect import connect_async
from contract.redis.due import Due, Work
from demo.stack import RedisServer
from gateway.redis.idempotency import LEASE_MS, IdempotencyStore

KINDS: list[Work] = ["batch", "webhook", "file", "upload"]
STEPS_S = (-10, -600, -86_400)


@pytest.fixture
def clock(tmp_path: Path) -> WrongClock:
    if not compiler():
        pytest.skip("no C compiler: the clock cannot be set wrong")
    return WrongClock(tmp_path / "clock")


@pytest.fixture
def server(clock: WrongClock, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", binary=clock.binary) as server:
        yield server


@pytest.fixture
def due(server: RedisServer) -> Due:
    return Due.using(BatchStore(server.client(), ttl_ms=60_000))


@pytest.mark.parametrize("by_s", STEPS_S)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_due_before_a_step_is_due_after_it(
    due: Due, clock: WrongClock, kind: Work, by_s: int
) -> None:
    due.claim(kind, 1000)  # somebody looks from time to time
    due.add(kind, "now")
    due.add(kind, "later", 5000)
    clock.step(by_s)
    found = due.claim(kind, 60_000, 10)
    clock.step(1.1)  # the clock is noted once a second
    found += due.claim(kind, 60_000, 10)
    assert [claim.id for claim in found] == ["now"]
    clock.step(6)
    assert [claim.id for claim in due.claim(kind, 60_000, 10)] == ["later"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lease_ends_in_its_time_after_a_step(due: Due, clock: WrongClock, kind: Work) -> None:
    due.add(kind, "a")
    (claim,) = due.claim(kind, 5000)
    clock.step(-600)
    assert due.claim(kind, 5000) == []
    due.add(kind, "a")  # as a cancel does
    clock.step(4)
    assert due.claim(kind, 5000) == []
    assert due.renew([claim], 5000) == [True]
    clock.step(6)
    (another,) = due.claim(kind, 5000)
    assert another.token != claim.token


def test_what_waits_longer_than_anything_may_is_due(
    due: Due, server: RedisServer, clock: WrongClock
) -> None:
    """The clock stepped back while no gateway looked."""
    client: redis.Redis = server.client()
    seconds, _ = client.time()
    client.zadd("warmq:gateway:due:batch", {"a": (seconds + 600) * 1000})
    client.zadd("warmq:gateway:due:webhook", {"b": (seconds + 90_000) * 1000})
    assert [claim.id for claim in due.claim("batch", 1000)] == ["a"]
    assert [claim.id for claim in due.claim("webhook", 1000)] == ["b"]


def test_many_are_moved_in_several_calls(due: Due, server: RedisServer, clock: WrongClock) -> None:
    client: redis.Redis = server.client()
    due.claim("file", 1000)
    seconds, _ = client.time()
    names = {f"file-{n}": seconds * 1000 + 100 + n // 10 for n in range(2500)}
    client.zadd("warmq:gateway:due:file", names)
    clock.step(-600)
    found: list[str] = []
    for _ in range(40):
        found += [claim.id for claim in due.claim("file", 60_000, 100)]
    clock.step(1)
    for _ in range(40):
        found += [claim.id for claim in due.claim("file", 60_000, 100)]
    assert sorted(found) == sorted(names)


def test_a_post_that_died_before_a_step_back_is_tried_again_after_its_lease(
    server: RedisServer, clock: WrongClock
) -> None:
    async def run() -> None:
        tries = IdempotencyStore(connect_async(server.url, "test"))
        assert (await tries.begin("a", "f", "first")).state == "new"
        clock.step(-600)
        seen = await tries.begin("a", "f", "second")
        assert seen.state == "running"
        assert seen.wait_ms <= LEASE_MS
        clock.step(LEASE_MS / 1000 + 1)
        assert (await tries.begin("a", "f", "second")).state == "new"
        await tries.close()

    asyncio.run(run())
