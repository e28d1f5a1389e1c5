"""The stays of a worker with several models: real Redis, simulated engine, one process."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import redis
from kit.drain.draining import soon
from kit.protocol.lessee import submit_batch

from contract.errors import StoreUnreachable
from contract.redis import keys
from contract.redis.batches import BatchStore
from worker.drain.drain import Drain
from worker.drain.leases import Leases
from worker.drain.loop import run_drain
from worker.drain.side_tasks import SideTasks
from worker.engine.catalogue import load_settings, make_engine
from worker.models import stays
from worker.models.backlog import BacklogReads
from worker.models.config import ASSUMED_SWAP_S, models_of
from worker.models.policy import Swap, Terms, choose
from worker.models.stays import Stays
from worker.settings import WorkerSettings

WORKER = "test.1.stays"
ENTRY = {"min_stay": "0s", "max_wait": "0s"}


class Running:
    """Runs the stays of the models a and b; `drains` are those that have begun."""

    def __init__(self, url: str, worker: str = WORKER, entry: Mapping[str, str] = ENTRY) -> None:
        models = json.dumps(dict.fromkeys("ab", entry))
        fast = json.dumps({"latency_s": 0})
        settings = load_settings(
            engine="simulated", redis_url=url, models=models, simulated_tests=fast
        )
        self.worker, self.drains = worker, list[Drain]()
        #: Called after each stay.
        self.ended: Callable[[], None] = lambda: None
        self.stays = Stays(models_of(settings), worker, self._run, self._run)

    async def _run(self, settings: WorkerSettings, begin: Callable[[Drain], None]) -> None:
        leases = Leases(settings, self.worker)
        drain = Drain(settings, leases, lambda: make_engine(settings))
        begin(drain)
        self.drains.append(drain)
        try:
            await run_drain(drain, SideTasks(drain).tasks())
        finally:
            await leases.close()
            self.ended()

    def stop(self) -> None:
        """End the last stay."""
        self.stays.stop()
        for drain in self.drains[-1:]:
            drain.stop()


@pytest.mark.parametrize("loaded", [None, "a"])
async def test_an_unforeseen_error_is_logged_and_decisions_go_on(
    loaded: str | None, store: BatchStore, redis_url: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    left = [2]

    def broken(stay: Any, *rest: Any) -> Swap | None:
        if stay.model == loaded and left[0]:
            left[0] -= 1
            raise KeyError("unforeseen")
        return choose(stay, *rest)

    monkeypatch.setattr(stays, "choose", broken)
    monkeypatch.setattr(stays, "EVERY_S", 0.01)
    running = Running(redis_url)

    async def answers(batch: str, model: str) -> None:
        submit_batch(store, 3, batch_id=batch, queue=f"warmq.{model}")
        await soon(lambda: (b := store.batch(batch)) and b.finished, what=batch)

    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(running.stays.run())
        for batch, model in (("b1", "b"), ("b2", "a"), ("b3", "b")):
            await answers(batch, model)
        running.stop()
        await task
    said = [r for r in caplog.records if getattr(r, "action", "") == "swap_waits"]
    assert ["unforeseen" in r.getMessage() for r in said] == [True]
    assert said[0].exc_info


async def test_a_claim_whose_reply_is_lost_is_taken_back(
    redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, claim, made = [Swap("b", "a test wants it")], BacklogReads.claim, []

    def once(stay: Any, *_: Any) -> Swap | None:
        return wanted.pop() if stay.model and wanted else None

    def lost(*args: Any) -> bool:
        made.append(claim(*args))
        raise StoreUnreachable("the connection broke")

    monkeypatch.setattr(stays, "choose", once)
    monkeypatch.setattr(BacklogReads, "claim", lost)
    monkeypatch.setattr(stays, "EVERY_S", 0.01)
    running = Running(redis_url)
    task = asyncio.create_task(running.stays.run())
    await soon(lambda: made)
    await soon(lambda: not redis_client.hlen(keys.SWAP_CLAIMS), 10, "no claim")
    running.stop()
    await asyncio.wait_for(task, 30)
    assert len(running.drains) == 1


async def test_a_stop_while_a_swap_is_claimed_is_no_swap(
    store: BatchStore, redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, claim, made = asyncio.get_running_loop(), BacklogReads.claim, []

    def stopped_meanwhile(*args: Any) -> bool:
        made.append(claim(*args))
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        return made[-1]

    async def stop() -> None:
        running.stop()

    monkeypatch.setattr(BacklogReads, "claim", stopped_meanwhile)
    monkeypatch.setattr(stays, "EVERY_S", 0.01)
    running = Running(redis_url)
    task = asyncio.create_task(running.stays.run())
    await soon(lambda: running.drains)
    submit_batch(store, 3, batch_id="b1", queue="warmq.b")
    await asyncio.wait_for(task, 30)
    assert made == [True] and len(running.drains) == 1
    assert not redis_client.hlen(keys.SWAP_CLAIMS)
    assert not redis_client.hlen(keys.WORKERS)  # the worker has left, it announces no swap


async def test_a_stop_after_the_old_engine_has_ended_leaves_no_announcement(
    store: BatchStore, redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stays, "EVERY_S", 0.01)
    running = Running(redis_url)
    running.ended = running.stop
    task = asyncio.create_task(running.stays.run())
    await soon(lambda: running.drains)
    submit_batch(store, 3, batch_id="b1", queue="warmq.b")
    await asyncio.wait_for(task, 30)
    assert len(running.drains) == 1
    assert not redis_client.hlen(keys.SWAP_CLAIMS)
    assert not redis_client.hlen(keys.WORKERS)


async def test_workers_that_start_together_load_different_models(
    store: BatchStore, redis_url: str
) -> None:
    for model in "ab":
        submit_batch(store, 500, batch_id=f"b-{model}", queue=f"warmq.{model}")
    fleet = [Running(redis_url, f"test.{n}.stays") for n in range(2)]
    tasks = [asyncio.create_task(each.stays.run()) for each in fleet]
    await soon(lambda: all(each.drains for each in fleet))
    assert {each.drains[0].settings.served_model_name for each in fleet} == {"a", "b"}
    for each in fleet:
        each.stop()
    await asyncio.wait_for(asyncio.gather(*tasks), 30)


async def test_a_stay_lasts_by_the_measured_swap(
    store: BatchStore, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Terms] = []

    def noted(stay: Any, demands: Any, terms: dict[str, Terms]) -> Swap | None:
        seen.append(terms["a"])
        return choose(stay, demands, terms)

    monkeypatch.setattr(stays, "choose", noted)
    monkeypatch.setattr(stays, "EVERY_S", 0.01)
    running = Running(redis_url, entry={})
    task = asyncio.create_task(running.stays.run())
    await soon(lambda: seen and seen[-1].swap_s != ASSUMED_SWAP_S)
    running.stop()
    await asyncio.wait_for(task, 30)
    assert seen[0] == Terms(ASSUMED_SWAP_S, 20 * ASSUMED_SWAP_S)
    assert 0 < seen[-1].swap_s < 10 and seen[-1].min_stay_s == 60
