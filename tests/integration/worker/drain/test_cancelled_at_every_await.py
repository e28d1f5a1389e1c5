"""One cancellation ends each task that lives long, wherever it waits; Redis comes and goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from kit.drain.cancelling import Make, cancel_at

from contract.errors import StoreUnavailable
from contract.redis.connect import connect_async
from demo.stack import RedisServer
from gateway import sweeping
from gateway.background import background
from gateway.http.services import Services
from gateway.metrics.routes import Snapshots
from gateway.metrics.series import RouteCounts
from gateway.online.pending import PendingRequests, Waiter
from gateway.online.state import Revocations
from gateway.page.live import LiveFeed, Viewer
from gateway.redis.api_keys import KeyLookup
from gateway.redis.online import OnlineRequests, Push, Subscription
from gateway.settings import GatewaySettings
from worker.drain import sweeper
from worker.drain.drain import Drain
from worker.drain.leases import Leases
from worker.drain.side_tasks import SideTasks
from worker.engine.simulated import SimulatedSettings
from worker.engine.simulated.engine import SimulatedEngine

sleep = asyncio.sleep
#: Awaits at which each is cancelled: more than a round of the longest.
AWAITS = 16


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no task under test rest: each pause is a step of the loop."""

    async def brief(seconds: float, *args: Any) -> Any:
        return await sleep(min(seconds, 0.001), *args)

    monkeypatch.setattr(asyncio, "sleep", brief)
    monkeypatch.setattr(sweeper, "SWEEP_S", 0.001)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Return a Redis of these tests' own: they cut off whoever is connected."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    store = str(tmp_path / "files")
    found = Services.open(GatewaySettings(_env_file=None, redis_url=redis_url, gateway_store=store))
    yield found
    found.close()


@asynccontextmanager
async def cut_off(client: redis.Redis, kind: str) -> AsyncIterator[None]:
    """Close all connections of a kind again and again."""

    async def cut() -> None:
        while True:
            client.client_kill_filter(_type=kind, skipme=True)
            await sleep(0.005)

    cutting = asyncio.create_task(cut())
    try:
        yield
    finally:
        cutting.cancel()
        await asyncio.wait([cutting])


async def at_every_await(make: Make, client: redis.Redis | None = None, kind: str = "") -> None:
    """Cancel it at one await after the other, with connections that are cut off or stay."""
    for late in (False, True):
        for at in range(1, AWAITS + 1):
            if client is None:
                reached = await cancel_at(make, at, late)
            else:
                async with cut_off(client, kind):
                    reached = await cancel_at(make, at, late)
            assert reached or late or at > 1  # what it waits for need not come
            if not reached:
                break


def test_results_are_heard_until_it_is_cancelled(redis_url: str, redis_client: redis.Redis) -> None:
    async def run() -> None:
        live = OnlineRequests.open(redis_url, "test")
        settings = GatewaySettings(_env_file=None, redis_url=redis_url)

        def make() -> Any:
            waiting = PendingRequests(live, settings)
            waiting._waiters["r"] = [Waiter(Push("l", "r", None, b""), listens=True)]
            return waiting.run()

        await at_every_await(make)
        await at_every_await(make, redis_client, "pubsub")
        await live.close()

    asyncio.run(run())


def test_a_redis_that_resets_connections_swallows_nothing() -> None:
    async def run() -> None:
        def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        server = await asyncio.start_server(reset, "127.0.0.1", 0)
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        live = OnlineRequests.open(url, "test")
        settings = GatewaySettings(_env_file=None, redis_url=url)
        await at_every_await(lambda: PendingRequests(live, settings).run())
        await live.close()
        server.close()

    asyncio.run(run())


def test_a_subscription_ends(redis_url: str, redis_client: redis.Redis) -> None:
    async def run() -> None:
        client = connect_async(redis_url, "test")

        async def hear() -> None:
            while True:
                subscription = Subscription(client, ["p*"], ["c"])
                try:
                    await subscription.open()
                    await subscription.receive(lambda *_: None)
                except StoreUnavailable:
                    continue
                finally:
                    await subscription.close()

        await at_every_await(hear)
        await client.aclose()

    asyncio.run(run())


def test_background_work_of_a_gateway_ends(services: Services, redis_client: redis.Redis) -> None:
    async def run() -> None:
        url = services.settings.redis_url.get_secret_value()
        lookup = KeyLookup.open(url, "test")
        revocations = Revocations(lookup)
        revocations._waiters["d"] = set()
        feed = LiveFeed(services)
        feed._viewers.add(Viewer("t", ()))

        async def scraped() -> None:
            snapshots = Snapshots(services, RouteCounts([]))
            snapshots._scraped_at = time.monotonic()
            snapshots._wanted.set()
            await snapshots.run()

        for make in (revocations.run, feed._run, scraped):
            await at_every_await(make)
            await at_every_await(make, redis_client, "normal")
        await at_every_await(lambda: sweeping._remove_expired(services))
        await lookup.close()

    asyncio.run(run())


SIDE_TASKS = 13


@pytest.mark.parametrize("number", range(SIDE_TASKS))
def test_what_runs_beside_a_drain_ends(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path, number: int
) -> None:
    settings = SimulatedSettings(
        _env_file=None, redis_url=redis_url, engine="simulated",
        heartbeat_file=str(tmp_path / "heartbeat"),
    )  # fmt: skip

    async def run() -> None:
        leases = Leases(settings, f"test.1.{time.monotonic_ns()}")

        def make() -> Any:
            drain = Drain(settings, leases, lambda: SimulatedEngine(1, 0.0))
            drain.wakeup.queue_empty.set()
            works = [*SideTasks(drain).tasks(), drain.wakeup.run(), drain._committer.run()]
            assert len(works) == SIDE_TASKS
            for other in (*works[:number], *works[number + 1 :]):
                other.close()
            return works[number]

        await at_every_await(make)
        await at_every_await(make, redis_client, "pubsub")
        await at_every_await(make, redis_client, "normal")
        await leases.close()

    asyncio.run(run())


def test_background_work_that_fails_is_logged_and_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = asyncio.Event()

    async def failing() -> None:
        if "failing failed and is restarted" in caplog.text:
            begun.set()
            await asyncio.Event().wait()
        raise ValueError("a fault of our own")

    async def run() -> None:
        async with background(failing):
            await asyncio.wait_for(begun.wait(), 10)

    asyncio.run(run())
    assert "a fault of our own" in caplog.text


def test_work_that_swallows_a_cancellation_ends_all_the_same() -> None:
    swallowed: list[bool] = []

    async def swallowing() -> None:
        while len(swallowed) < 2:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            swallowed.append(True)

    async def run() -> None:
        async with background(swallowing):
            await sleep(0)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert swallowed
