"""Workers share a server that people use: the script in a real Redis, and two engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
import redis
from kit.protocol.lessee import Lessee
from kit.servers.stub_server import StubServer

from contract.openai.body import CHAT_URL
from worker.engine import Completion, EngineRequest
from worker.engine.openai import OpenAISettings
from worker.engine.openai.engine import OpenAIEngine
from worker.engine.openai.server_share import LEASE_S
from worker.engine.openai.shared import Sharing

KEY, KEPT = "warmq:server:host:8000", "warmq:server:host:8000:kept"
#: A port at which nobody listens.
NO_REDIS = "redis://127.0.0.1:1/0"
WEEK_MS = 7 * 86_400_000


class Reply(NamedTuple):
    """The answer of SERVER SHARE."""

    leads: int
    limit: int
    share: int
    others: int
    busy: int
    finished: int
    today: int
    shown: bytes
    quiet: bytes


class Workers:
    """Workers by name; each call renews one's lease."""

    def __init__(self, lessee: Lessee) -> None:
        self._lessee = lessee

    def renew(
        self, name: str, running: int = 0, waits: int = 9, *, can_lead: bool = True,
        lease_ms: int = 60_000, answered: int = 0, tokens: int = 0, limit: int | str = "",
        model: str = "m", quiet: str = "",
    ) -> Reply:  # fmt: skip
        reply = self._lessee.run(
            "server_share", "host:8000", name, lease_ms, int(can_lead), running, waits, answered,
            tokens, limit, '{"why": "x"}', model, quiet,
        )  # fmt: skip
        return Reply(*reply) if reply else Reply(*(-1,) * 7, b"", b"")


@pytest.fixture
def workers(worker: Lessee) -> Workers:
    return Workers(worker)


def test_the_first_worker_leads_and_only_its_limit_counts(workers: Workers) -> None:
    assert workers.renew("a")[:4] == (1, -1, 0, 0)
    assert workers.renew("b", limit=50)[:4] == (0, -1, 0, 1)
    assert workers.renew("a", limit=10)[:4] == (1, 10, 5, 1)
    reply = workers.renew("b", limit=50)
    assert (reply.leads, reply.limit, reply.shown) == (0, 10, b'{"why": "x"}')


def test_shares_are_even_and_a_place_is_free_when_its_request_has_ended(workers: Workers) -> None:
    workers.renew("a", limit=10)
    assert workers.renew("a", running=10).share == 10
    assert workers.renew("b").share == 0
    assert workers.renew("a", running=10).share == 5
    assert workers.renew("b").share == 0  # ten requests of the other one run
    workers.renew("a", running=7)
    assert workers.renew("b").share == 3
    workers.renew("a", running=4)
    assert workers.renew("b", running=3).share == 5


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 100])
def test_shares_of_many_workers_are_never_more_than_the_limit(workers: Workers, limit: int) -> None:
    names = ["a", "b", "c"]
    workers.renew("a", limit=limit)
    for _ in range(3):
        shares = [workers.renew(name).share for name in names]
    assert sum(shares) == limit
    assert max(shares) - min(shares) <= 1


def test_a_worker_without_requests_leaves_its_share_to_those_with_some(workers: Workers) -> None:
    workers.renew("a", limit=12)
    assert workers.renew("b", waits=0).share == 1
    assert workers.renew("a", running=12).share == 12
    workers.renew("b", waits=5)
    assert workers.renew("a", running=12).share == 6
    workers.renew("a", waits=0)
    assert workers.renew("b", waits=5).share == 12


def test_what_a_dead_worker_had_goes_to_the_others_when_its_lease_ends(
    workers: Workers, redis_client: redis.Redis
) -> None:
    workers.renew("a", limit=10)
    workers.renew("b", running=5)
    assert workers.renew("a", running=5).share == 5
    redis_client.hset(KEY, "of:b", "1 5 5 9")  # its lease has ended
    reply = workers.renew("a", running=5)
    assert (reply.share, reply.others, reply.busy) == (10, 0, 0)
    assert not redis_client.hexists(KEY, "of:b")
    assert 0 < redis_client.pttl(KEY) <= 60_000


def test_a_dead_leader_is_replaced_and_its_limit_stays_until_then(
    workers: Workers, redis_client: redis.Redis
) -> None:
    workers.renew("a", limit=10)
    workers.renew("b")
    redis_client.hset(KEY, "of:a", "1 5 5 9")
    assert workers.renew("b", can_lead=False)[:3] == (0, 10, 10)
    assert workers.renew("b")[:3] == (1, 10, 10)
    assert workers.renew("a", limit=99)[:2] == (0, 10)


def test_a_leader_that_cannot_measure_or_leaves_is_followed_by_another(workers: Workers) -> None:
    workers.renew("a", limit=10)
    assert workers.renew("b").leads == 0
    assert workers.renew("a", can_lead=False).leads == 0
    assert workers.renew("b").leads == 1
    workers.renew("b", lease_ms=0)
    assert workers.renew("a")[:4] == (1, 10, 10, 0)


def test_a_lease_from_a_later_clock_is_none(workers: Workers, redis_client: redis.Redis) -> None:
    workers.renew("a", limit=10)
    workers.renew("b")
    redis_client.hset(KEY, "of:b", f"{2**50} 5 5 9")
    assert workers.renew("a").others == 0
    redis_client.hset(KEY, "of:b", "not a lease")
    assert workers.renew("a").others == 0


def test_answers_are_counted_and_what_others_may_have_in_flight(workers: Workers) -> None:
    workers.renew("a", limit=10, answered=3)
    workers.renew("b", running=2, answered=4)
    reply = workers.renew("a")
    assert (reply.finished, reply.busy) == (7, 2)
    workers.renew("b", running=2)  # it has a share now, and requests that wait
    assert workers.renew("a").busy == 5
    workers.renew("b", running=2, waits=0)
    assert workers.renew("a").busy == 2


def test_quiet_values_are_kept_for_each_model_for_a_week(
    workers: Workers, redis_client: redis.Redis
) -> None:
    assert workers.renew("a", quiet="0.02 0.006").quiet == b"0.02 0.006"
    workers.renew("a", model="other", quiet="0.05 -")
    assert workers.renew("b").quiet == b"0.02 0.006"
    assert workers.renew("b", model="other").quiet == b"0.05 -"
    assert workers.renew("b", model="new").quiet == b""
    assert WEEK_MS - 60_000 < redis_client.pttl(KEPT) <= WEEK_MS
    redis_client.hset(KEPT, "quiet:m", "1 0.02 0.006")
    assert workers.renew("b").quiet == b""


def test_tokens_of_a_day_are_those_of_all_workers(
    workers: Workers, redis_client: redis.Redis
) -> None:
    workers.renew("a", tokens=100)
    assert workers.renew("b", tokens=20).today == 120
    workers.renew("a", tokens=3, lease_ms=0)
    assert workers.renew("b").today == 123
    assert redis_client.pttl(KEPT) > WEEK_MS - 60_000
    redis_client.hset(KEPT, "day", "20000 5000")
    assert workers.renew("b", tokens=1).today == 1


# -- two engines ---------------------------------------------------------------------------


@asynccontextmanager
async def engine(server: StubServer, url: str, **settings: Any) -> AsyncIterator[OpenAIEngine]:
    """Yield a started engine in front of this server, which people use."""
    known = {"model": None, "openai_shared_with": "people", "openai_ttft_ms": 5000.0,
             "openai_itl_ms": 10_000.0, "openai_concurrency": 12}  # fmt: skip
    made = OpenAIEngine(
        OpenAISettings(
            engine="openai", openai_base_urls=server.url, redis_url=url, **known | settings
        )
    )
    await made.start()
    try:
        yield made
    finally:
        await asyncio.to_thread(made.shutdown)


def start(running: OpenAIEngine, count: int) -> list[asyncio.Task[Completion]]:
    request = EngineRequest(CHAT_URL, {"messages": [{"role": "user", "content": "x"}]})
    return [asyncio.create_task(running.generate(request, f"r{n}")) for n in range(count)]


async def until(look: Callable[[], object], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not look():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.01)


def in_flight(running: OpenAIEngine) -> int:
    return running._servers.servers[0].in_flight


@pytest.fixture
def _without_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """One start for each step would keep three of the stub's short answers in flight."""
    monkeypatch.setattr(Sharing, "_pace_s", lambda _self: 0.0)


@pytest.mark.usefixtures("_without_pace")
async def test_two_engines_share_one_limit_and_one_takes_all_when_the_other_is_gone(
    redis_url: str,
) -> None:
    async with (
        StubServer(latency_s=0.2) as server,
        engine(server, redis_url) as first,
        engine(server, redis_url) as second,
    ):
        tasks = [*start(first, 2000), *start(second, 2000)]
        await until(lambda: in_flight(first) == in_flight(second) == 6)
        assert server.most <= 12 + 2  # a probe, and one with which an idle worker begins
        leads = [one._sharing[0]._leads for one in (first, second)]
        assert sorted(leads) == [False, True]

        def shown() -> list[dict[str, Any]]:
            return [one._sharing[0].shown() for one in (first, second)]

        await until(lambda: [row["limit"] for row in shown()] == [12, 12])
        assert [row["workers"] for row in shown()] == [2, 2]
        await until(lambda: len({row["why"] for row in shown()}) == 1)
        leader, other = (first, second) if leads[0] else (second, first)
        sharing = leader._sharing[0]
        assert sharing._renewing is not None
        sharing._renewing.cancel()  # as if its process had been killed
        for task in tasks[:2000] if leader is first else tasks[2000:]:
            task.cancel()
        await until(lambda: in_flight(other) == 12, LEASE_S + 10)
        assert other._sharing[0]._leads
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        sharing.share.latest = None


@pytest.mark.usefixtures("_without_pace")
async def test_an_engine_that_stops_leaves_its_share_at_once(
    redis_url: str, redis_client: redis.Redis
) -> None:
    async with StubServer(latency_s=0.2) as server, engine(server, redis_url) as first:
        tasks = start(first, 2000)
        async with engine(server, redis_url) as second:
            tasks += start(second, 2000)
            await until(lambda: in_flight(first) == in_flight(second) == 6)
            for task in tasks[2000:]:
                task.cancel()
            await asyncio.gather(*tasks[2000:], return_exceptions=True)
        await until(lambda: in_flight(first) == 12, 4)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_quiet_values_outlive_the_engine(redis_url: str) -> None:
    learned = {"openai_ttft_ms": None, "openai_itl_ms": None}
    async with StubServer() as server:
        async with engine(server, redis_url, **learned) as first:
            sharing = first._sharing[0]
            await until(lambda: sharing.guard.quiet[0])
            quiet = sharing.guard.quiet
            await until(lambda: sharing.share.latest and sharing.share.latest.quiet[0])
        async with engine(server, redis_url, **learned) as second:
            guard = second._sharing[0].guard
            await until(lambda: guard.quiet[0])
            assert guard.ttft.quiet_steps >= 50
            assert guard.quiet[0] == pytest.approx(quiet[0], rel=1.0)


async def test_without_redis_an_engine_gives_way_as_one_that_is_alone() -> None:
    async with StubServer(latency_s=0.05) as server, engine(server, NO_REDIS) as running:
        answers = await asyncio.gather(*start(running, 200))
        assert [answer.completion_tokens for answer in answers] == [1] * 200
        assert server.most <= 13
