"""Every stop ends in time, whatever the worker is doing and whatever hangs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.drain.draining import LONG, leased, soon
from kit.drain.troubled import NEVER, Scene, scene

from contract import naming
from contract.errors import StoreUnavailable
from contract.redis import keys
from demo.stack import RedisServer
from worker.drain import keeper, lifecycle
from worker.drain.lifecycle import State

DRAIN_TIMEOUT_S = 0.4
#: What a starved machine may add.
SLACK_S = 6.0


# -- the states ------------------------------------------------------------------------------


async def building(on: Scene) -> None:
    on.send(LONG)
    await on.came_to("build")


async def starting(on: Scene) -> None:
    on.send(LONG)
    await on.came_to("start")


async def idle(on: Scene) -> None:
    await on.ready()


async def busy(on: Scene) -> None:
    await on.full()


async def running_suspects(on: Scene) -> None:
    on.send_suspect()
    await soon(lambda: on.running.engines and on.engine.running == 1)


async def waiting_for_its_own_work(on: Scene) -> None:
    """It has seen suspects, and runs them when its own requests have ended."""
    on.send(*[LONG] * 10)  # before the suspect: who finds it alone runs it at once
    on.send_suspect()
    await soon(lambda: on.running.engines and on.engine.running >= 4)
    await soon(lambda: on.running.leases.holds_suspects_lock)


async def recovering(on: Scene) -> None:
    """Its engine died, and one request has not been told."""
    await on.full(LONG, LONG, LONG, LONG, NEVER)
    await soon(lambda: len(on.running.drain.in_flight) == 5)
    on.engine.kill()
    await soon(lambda: len(on.running.drain.in_flight.tasks()) == 1)


async def rebuilding(on: Scene) -> None:
    await on.full()
    on.hangs.add("build")
    on.engine.kill()
    await on.came_to("build", engines=2)


async def ending_a_dead_engine(on: Scene) -> None:
    await on.full()
    on.hangs.add("shutdown")
    on.engine.kill()
    await on.came_to("shutdown")


async def redis_hangs_in_a_pop(on: Scene) -> None:
    await on.full(LONG, LONG, LONG, LONG)
    on.hang_redis()
    on.running.drain.wakeup.poke()
    await soon(lambda: on.running.leases._open_pops)


async def redis_hangs_while_idle(on: Scene) -> None:
    await on.ready()
    on.hang_redis()


async def redis_hangs_while_suspects_wait(on: Scene) -> None:
    await waiting_for_its_own_work(on)
    on.hang_redis()


async def redis_hangs_while_an_ending_waits(on: Scene) -> None:
    await on.full("simulate:sleep=0.5", LONG, LONG, LONG)
    on.hang_redis()
    await soon(lambda: any(r.ended for r in on.running.drain.in_flight))


async def redis_away(on: Scene) -> None:
    await on.full()
    on.server.stop()


async def redis_away_while_the_dead_engines_requests_go_back(on: Scene) -> None:
    await on.full()
    on.server.stop()
    on.engine.kill()
    await soon(lambda: not on.running.drain.in_flight.tasks())


@dataclass(frozen=True)
class Case:
    """A state: how a worker gets into it, what its engine hangs in, whether Redis answers."""

    bring_into: Callable[[Scene], Awaitable[None]]
    hangs: tuple[str, ...] = ()
    redis_answers: bool = True


CASES = {
    "building": Case(building, ("build",)),
    "building, deaf to a kill": Case(building, ("deaf build",)),
    "starting": Case(starting, ("start",)),
    "idle": Case(idle),
    "busy": Case(busy),
    "busy, the engine deaf to aborts": Case(busy, ("deaf generate",)),
    "busy, the engine's shutdown hangs": Case(busy, ("shutdown",)),
    "busy, the engine's shutdown fails": Case(busy, ("failing shutdown",)),
    "running suspects": Case(running_suspects),
    "waiting for its own work": Case(waiting_for_its_own_work),
    "recovering": Case(recovering),
    "rebuilding": Case(rebuilding),
    "ending a dead engine": Case(ending_a_dead_engine),
    "Redis hangs, idle": Case(redis_hangs_while_idle, redis_answers=False),
    "Redis hangs, in a POP": Case(redis_hangs_in_a_pop, redis_answers=False),
    "Redis hangs, suspects wait": Case(redis_hangs_while_suspects_wait, redis_answers=False),
    "Redis hangs, an ending waits": Case(redis_hangs_while_an_ending_waits, redis_answers=False),
    "Redis is away, busy": Case(redis_away, redis_answers=False),
    "Redis is away, recovering": Case(
        redis_away_while_the_dead_engines_requests_go_back, redis_answers=False
    ),
}


# -- the property ----------------------------------------------------------------------------


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a private Redis that may be stopped, and keeps what it has."""
    with RedisServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture(autouse=True)
def short_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the constants of a stop short; what they add up to is what is tested."""
    monkeypatch.setattr(lifecycle, "ABORT_S", 0.3)
    monkeypatch.setattr(lifecycle, "HURRY_S", 1.0)
    monkeypatch.setattr(keeper, "SHUTDOWN_S", 0.5)


async def stop(on: Scene, how: str) -> None:
    """Stop the worker; assert that it ends in time, and that only Redis makes it complain."""
    drain = on.running.drain
    bound_s = lifecycle.HURRY_S + lifecycle.CANCEL_S + keeper.SHUTDOWN_S + SLACK_S
    bound_s += DRAIN_TIMEOUT_S if how == "stop" else 0
    began = time.monotonic()
    drain.stop() if how == "stop" else drain.hurry()
    try:
        await on.running.ended(bound_s)
    except BaseExceptionGroup as group:
        _, others = group.split(StoreUnavailable)
        assert others is None
    assert time.monotonic() - began <= bound_s
    assert on.running.state is State.STOPPED


@pytest.mark.parametrize("how", ["stop", "hurry"])
@pytest.mark.parametrize("state", list(CASES))
async def test_a_stop_ends_in_time_and_hands_all_back_without_a_death(
    own_redis: RedisServer, state: str, how: str
) -> None:
    case = CASES[state]
    async with scene(own_redis, *case.hangs, drain_timeout_s=DRAIN_TIMEOUT_S) as on:
        await case.bring_into(on)
        before = on.client.hgetall(keys.DEATHS) if case.redis_answers else {}
        await stop(on, how)
        on.bring_redis_back()
        if case.redis_answers:
            assert sorted(on.queued()) == sorted(on.ids)
            assert leased(on.client) == 0
            assert not on.client.exists(keys.suspects_list(naming.DEFAULT_QUEUE) + ":lock")
        # Nothing is lost where Redis did not answer either, and nobody was blamed.
        assert sorted({*on.queued(), *on.held(), *on.answered()}) == sorted(on.ids)
        assert on.client.hgetall(keys.DEATHS) == before
