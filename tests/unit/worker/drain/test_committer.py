"""How endings are put together before they go to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from contract.message import Delivery
from worker.drain import committer
from worker.drain.committer import Committer
from worker.drain.endings import Ending


class Redis:
    """Takes groups, and its time over each if it is held."""

    def __init__(self) -> None:
        self.groups: list[list[Ending]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def done(self, endings: Sequence[Ending]) -> int:
        await self.open.wait()
        self.groups.append(list(endings))
        return len(endings)


@pytest.fixture
async def redis() -> AsyncIterator[Redis]:
    yield Redis()


@pytest.fixture
async def writes(redis: Redis) -> AsyncIterator[Committer]:
    made = Committer(redis, lambda group: None)  # type: ignore[arg-type]
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()


def ending(meta: bytes = b"{}", keep_ms: int | None = None) -> Ending:
    delivery = Delivery(
        "w/1", "id", "warmq.generate", "", "", "", 0, None, None, None, None, False, {}, {},
        keep_ms=keep_ms,
    )  # fmt: skip
    return Ending(delivery, "completed", meta)


async def test_endings_that_come_within_the_linger_share_a_round_trip(
    redis: Redis, writes: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "LINGER_S", 1.0)
    for _ in range(10):
        writes.put(ending())
        await asyncio.sleep(0)  # a step of its own
    assert redis.groups == []  # more are in flight, so they linger
    await writes.flush()
    assert [len(group) for group in redis.groups] == [10]


async def test_the_last_ones_in_flight_do_not_linger(
    redis: Redis, writes: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "LINGER_S", 3600)
    writes._enough = lambda: 2
    writes.put(ending())
    writes.put(ending())
    await asyncio.wait_for(writes.flush(), 5)
    assert [len(group) for group in redis.groups] == [2]


async def test_endings_of_one_step_of_the_engine_do_not_linger_if_they_are_enough(
    redis: Redis, writes: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "LINGER_S", 3600)
    for _ in range(committer.STEP_GROUP):
        writes.put(ending())
    await asyncio.wait_for(writes.flush(), 5)
    assert [len(group) for group in redis.groups] == [committer.STEP_GROUP]


async def test_many_endings_go_in_groups_so_that_redis_and_the_loop_work_side_by_side(
    redis: Redis, writes: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "LINGER_S", 3600)
    for _ in range(2 * committer.GROUP + 1):
        writes.put(ending())
    await asyncio.wait_for(writes.flush(), 5)
    assert [len(group) for group in redis.groups] == [committer.GROUP, committer.GROUP, 1]


async def test_a_group_ends_at_its_bytes_and_the_rest_follows_at_once(
    redis: Redis, writes: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "LINGER_S", 3600)
    monkeypatch.setattr(committer, "GROUP_BYTES", 100)
    writes._enough = lambda: 5
    for _ in range(5):
        writes.put(ending(b"x" * 60))
    await asyncio.wait_for(writes.flush(), 5)
    assert [len(group) for group in redis.groups] == [2, 2, 1]


async def test_a_flush_waits_for_what_is_under_way_and_for_what_came_meanwhile(
    redis: Redis, writes: Committer
) -> None:
    redis.open.clear()
    for _ in range(committer.GROUP):
        writes.put(ending())
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the first group is on its way
    writes.put(ending())
    flushing = asyncio.create_task(writes.flush())
    done, _ = await asyncio.wait([flushing], timeout=0.05)
    assert not done
    redis.open.set()
    await asyncio.wait_for(flushing, 5)
    assert sum(map(len, redis.groups)) == committer.GROUP + 1


async def test_the_ending_of_an_online_request_waits_for_no_others(
    redis: Redis, writes: Committer
) -> None:
    writes.put(ending(keep_ms=60_000))
    for _ in range(3):
        await asyncio.sleep(0)
    assert [len(group) for group in redis.groups] == [1]


async def test_online_requests_that_end_during_a_done_share_the_next(
    redis: Redis, writes: Committer
) -> None:
    redis.open.clear()
    for _ in range(5):
        writes.put(ending(keep_ms=60_000))
        await asyncio.sleep(0)
    redis.open.set()
    await writes.flush()
    assert [len(group) for group in redis.groups] == [1, 4]
