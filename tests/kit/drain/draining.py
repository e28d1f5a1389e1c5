"""A drain on the test's own loop, with the simulated engine and a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
import redis
from kit.protocol.lessee import (
    QUEUE,
    celery_message,
    stored,
)

from contract.redis import keys
from worker.drain.drain import Drain
from worker.drain.leases import Leases
from worker.drain.lifecycle import State
from worker.drain.loop import run_drain
from worker.drain.side_tasks import SideTasks
from worker.drain.supervisor import Supervisor
from worker.engine.simulated import SimulatedSettings
from worker.engine.simulated.engine import SimulatedEngine

T = TypeVar("T")
LONG = "simulate:sleep=600"


async def soon(look: Callable[[], T], timeout_s: float = 30, what: str = "") -> T:
    """Return the first truthy value of `look`; the loop runs on meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not (value := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what or look}")
        await asyncio.sleep(0.005)
    return value


@dataclass
class Draining:
    """A drain that runs on the test's loop, and what it is made of."""

    settings: SimulatedSettings
    leases: Leases
    drain: Drain
    side_tasks: SideTasks
    engines: list[SimulatedEngine] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def supervisor(self) -> Supervisor:
        """The drain's keeper of the engine."""
        return self.drain.supervisor

    @property
    def state(self) -> State:
        """What the worker is doing."""
        return self.drain.lifecycle.state

    @property
    def engine(self) -> SimulatedEngine:
        """The engine that was built last."""
        return self.engines[-1]

    async def ended(self, timeout_s: float = 30) -> None:
        """Wait until the drain has ended."""
        assert self.task is not None
        await asyncio.wait_for(asyncio.shield(self.task), timeout_s)


@asynccontextmanager
async def draining(
    url: str,
    engine: Callable[[int, float], SimulatedEngine] = SimulatedEngine,
    side_tasks: bool = True,
    **options: Any,
) -> AsyncIterator[Draining]:
    """Run a drain for the block; it is told to hurry at the end, if it still runs."""
    tests = orjson.dumps({"latency_s": options.pop("simulated_latency_s", 0.0)})
    defaults = {"engine": "simulated", "simulated_slots": 4, "simulated_tests": tests}
    settings = SimulatedSettings(redis_url=url, **(defaults | options))
    leases = Leases(settings, f"test.1.{time.monotonic_ns()}")
    engines: list[SimulatedEngine] = []

    def make() -> SimulatedEngine:
        engines.append(engine(settings.simulated_slots, settings.simulated_tests.latency_s))
        return engines[-1]

    drain = Drain(settings, leases, make)
    running = Draining(settings, leases, drain, SideTasks(drain), engines)
    side = running.side_tasks.tasks() if side_tasks else []
    running.task = asyncio.create_task(run_drain(drain, side))
    try:
        yield running
        if not running.task.done():
            drain.hurry()
        await running.ended(20)
    finally:
        running.task.cancel()
        await asyncio.wait([running.task])
        await leases.close()


def send(client: redis.Redis, *bodies: dict[str, Any], **headers: Any) -> list[str]:
    """Queue plain Celery requests t0, t1, ...; return their ids."""
    ids = [f"t{n}" for n in range(len(bodies))]
    for rid, body in zip(ids, bodies, strict=True):
        client.lpush(QUEUE, celery_message(rid, body, **headers))
    return ids


def error_of(client: redis.Redis, request_id: str) -> dict[str, Any]:
    """Return the error of a stored result, or {}."""
    meta = stored(client, request_id)
    return (meta["warmq"]["error"] or {}) if meta else {}


def leased(client: redis.Redis) -> int:
    """Return how many leases there are, which both records agree on."""
    count = int(client.zcard(keys.LEASES))
    assert sum(client.hlen(key) for key in client.keys("warmq:worker:*")) == count
    return count
