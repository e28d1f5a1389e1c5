"""Requests that wait to be made ready for the engine keep nobody else's out of the worker."""

from __future__ import annotations

import asyncio

import orjson
import redis
from kit.drain.draining import draining, soon
from kit.protocol.lessee import QUEUE, Lease, Lessee, chat, stored, submit_batch

from contract import naming
from contract.message import write_online
from contract.openai.body import CHAT_URL
from contract.redis.batches import BatchStore
from worker.engine import Completion, EngineRequest
from worker.engine.preparation import Preparation, PreparingRequests, waiting
from worker.engine.simulated.engine import SimulatedEngine

MANY = 100


def ask(worker: Lessee, name: str, tenant: str, priority: int = 0) -> None:
    """Push an online chat, as a gateway does."""
    message = write_online(
        name, CHAT_URL, orjson.dumps(chat()), queue=QUEUE, priority=priority, tenant=tenant,
        deadline=4e9, keep_ms=60_000,
    )  # fmt: skip
    list_key = naming.turn_list(QUEUE, priority, tenant)
    assert worker.run("push", 1000, 0.9, list_key, name, "", message) == [1]


def names(leases: list[Lease]) -> list[str]:
    """Return the requests that were leased."""
    return [lease.request_id for lease in leases]


class Slow(SimulatedEngine):
    """Makes the requests of one tenant ready one after the other, each once it may."""

    prepares = asyncio.Semaphore(0)

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Wait for the turn, then answer."""
        if request.tenant == "greedy":
            with waiting():
                await self.prepares.acquire()
        return await super().generate(request, request_id)


async def test_others_are_answered_while_one_tenants_requests_are_prepared(
    redis_client: redis.Redis, redis_url: str
) -> None:
    Slow.prepares = asyncio.Semaphore(0)
    worker = Lessee(redis_client)
    for number in range(MANY):
        ask(worker, f"greedy-{number}", "greedy", priority=number % 2 * 6)
    async with draining(redis_url, Slow, look_ahead=2) as found:
        await soon(lambda: len(found.drain.preparing) >= 2)
        for number in range(10):
            ask(worker, f"polite-{number}", "polite")
            await soon(lambda n=number: stored(redis_client, f"polite-{n}"))
        # What one POP may bring beyond those that make a tenant pass, and no more.
        assert len(found.drain.preparing) <= found.drain.limits.limit + 2
        for _ in range(MANY):
            Slow.prepares.release()
        for number in range(MANY):
            await soon(lambda n=number: stored(redis_client, f"greedy-{n}"))
        assert len(found.drain.preparing) == 0


def test_pop_takes_nothing_of_tenants_that_are_passed_over(redis_client: redis.Redis) -> None:
    worker = Lessee(redis_client)
    for number, priority in enumerate((0, 3, 6, 9)):
        ask(worker, f"greedy-{number}", "greedy", priority=priority)
        ask(worker, f"polite-{number}", "polite", priority=priority)
    ask(worker, "greedy-4", "greedy")
    assert names(worker.pop(k=1)) == ["greedy-0"]
    assert worker.turn[1] > 0  # its turn goes on
    assert names(worker.pop(excluded=["greedy", "unknown"])) == [f"polite-{n}" for n in range(4)]
    assert worker.pop(excluded=["greedy"]) == []
    assert worker.head[3] == 0
    assert redis_client.hget(naming.turns_key(QUEUE), "waiting") == b"4"
    assert names(worker.pop()) == ["greedy-4", "greedy-1", "greedy-2", "greedy-3"]


def test_tenants_are_passed_over_also_while_messages_without_a_use_are_removed(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    """Then POP looks twice."""
    worker = Lessee(redis_client)
    cancelled = submit_batch(store, 500, batch_id="cancelled", tenant="polite")
    store.cancel(cancelled.batch)
    ask(worker, "greedy-0", "greedy")
    assert worker.pop(excluded=["greedy"]) == []


def test_a_request_of_which_two_tasks_wait_is_counted_once() -> None:
    changes: list[int] = []
    preparing = PreparingRequests(lambda: changes.append(len(preparing)))
    one, other = Preparation(preparing, "a"), Preparation(preparing, "")
    with one, other:
        with one:
            assert len(preparing) == 2
            assert preparing.busy_tenants(1) == ["a", ""]
            assert preparing.busy_tenants(2) == []
        assert len(preparing) == 2
    assert len(preparing) == 0
    assert changes == [1, 2, 1, 0]
