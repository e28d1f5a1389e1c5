"""What subscribers are told of a drain."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import redis
from kit.drain.draining import LONG, Draining, draining, send, soon
from kit.protocol.lessee import Lessee, chat, submit_batch

from contract.errors import EngineDead
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer
from worker.drain import events
from worker.drain.events import Event
from worker.engine import Completion, EngineRequest
from worker.engine.simulated.engine import SimulatedEngine


class Witness:
    """Subscribes to every kind of event."""

    def __init__(self, running: Draining) -> None:
        self.seen: list[Any] = []
        for kind in get_args(Event):
            running.drain.events.subscribe(kind, self.seen.append)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.seen if type(event) is kind]


async def test_a_request_is_leased_started_and_committed_with_its_times_and_tokens(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 3)
    async with draining(redis_url) as running:
        witness = Witness(running)
        await soon(lambda: running.drain.counts.completed == 3)
        kinds = [type(event) for event in witness.seen if type(event) is not events.EngineReady]
    assert kinds[0] is events.Leased
    assert kinds[-1] is events.Committed
    leased = [d.request_id for event in witness.of(events.Leased) for d in event.deliveries]
    assert leased == submitted.ids
    assert [event.delivery.request_id for event in witness.of(events.Started)] == submitted.ids
    endings = [e for event in witness.of(events.Committed) for e in event.endings]
    assert {e.delivery.request_id for e in endings} == set(submitted.ids)
    assert {e.outcome for e in endings} == {"completed"}
    assert all(e.prompt_tokens > 0 and e.completion_tokens > 0 for e in endings)
    assert all(e.times["engine_s"] >= 0 and e.times["queued_s"] >= 0 for e in endings)


async def test_an_engines_death_and_rebuild_and_what_was_in_it_are_told(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url) as running:
        witness = Witness(running)
        send(redis_client, chat(user=LONG))
        await soon(lambda: witness.of(events.Started))
        running.engine.kill()
        await soon(lambda: len(witness.of(events.EngineReady)) == 2)
    (died,) = witness.of(events.EngineDied)
    assert died.reason
    (handed_back, *_) = witness.of(events.HandedBack)
    assert [d.request_id for d in handed_back.deliveries] == ["t0"]
    assert handed_back.died == {handed_back.deliveries[0].lease}
    assert [event.rebuilt for event in witness.of(events.EngineReady)] == [False, True]


class DyingSlowly(SimulatedEngine):
    """Is dead before the requests in it hear of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.told, self.broken = asyncio.Event(), False

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        await self.told.wait()
        raise EngineDead("the connection to it broke")

    def dead(self) -> bool:
        return self.broken


async def test_a_death_is_told_once_with_its_reason_where_requests_hear_of_it_late(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url, DyingSlowly) as running:
        witness = Witness(running)
        send(redis_client, chat())
        await soon(lambda: len(running.drain.in_flight.tasks()) == 1)
        engine = running.engine
        assert isinstance(engine, DyingSlowly)
        engine.broken = True
        running.drain.wakeup.poke()
        engine.told.set()  # after the poke: the drain looks first
        await soon(lambda: len(witness.of(events.EngineReady)) == 2)
    reasons = [event.reason for event in witness.of(events.EngineDied)]
    assert reasons == ["the connection to it broke"]


async def test_redis_is_lost_once_and_back_once_in_an_outage(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--appendonly", "no") as server:
        async with draining(server.url, lease_s=2) as running:
            witness = Witness(running)
            await soon(lambda: witness.of(events.EngineReady))
            lost = running.drain.outage.lost = Mock(wraps=running.drain.outage.lost)  # type: ignore[method-assign]
            server.stop()
            await soon(lambda: lost.call_count >= 3)
            server.start()
            await soon(lambda: witness.of(events.RedisBack))
    assert len(witness.of(events.RedisLost)) == len(witness.of(events.RedisBack)) == 1
    assert witness.of(events.RedisBack)[0].away_s > 0


async def test_requests_of_a_dead_worker_that_are_put_back_are_told(
    redis_client: redis.Redis, redis_url: str
) -> None:
    send(redis_client, chat("one"), chat("two"))
    assert len(Lessee(redis_client, "dead").pop(lease_ms=1)) == 2
    async with draining(redis_url, lease_s=2) as running:
        witness = Witness(running)
        await soon(lambda: running.drain.counts.completed == 2)
    assert sum(event.requests for event in witness.of(events.Swept)) == 2


async def test_requests_whose_leases_others_took_are_told(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url, lease_s=2) as running:
        witness = Witness(running)
        send(redis_client, chat(user=LONG))
        await soon(lambda: len(running.drain.in_flight) == 1)
        redis_client.delete(keys.LEASES, *redis_client.keys("warmq:worker:*"))
        await soon(lambda: witness.of(events.LeasesLost))
    (lost,) = witness.of(events.LeasesLost)
    assert [d.request_id for d in lost.deliveries] == ["t0"]


async def test_a_listener_that_raises_is_logged_and_costs_nobody_a_result(
    redis_client: redis.Redis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: events.Committed) -> None:
        raise ZeroDivisionError("a metric")

    async with draining(redis_url) as running:
        running.drain.events.subscribe(events.Committed, broken)
        with caplog.at_level(logging.ERROR):
            send(redis_client, *[chat(f"{n}") for n in range(8)])
            await soon(lambda: running.drain.counts.completed == 8)
        running.drain.events.unsubscribe(events.Committed, broken)
    assert any("a subscriber of events failed" in record.message for record in caplog.records)
