"""The Lua scripts against a model: any order of steps, replies lost at any of them.

Three workers, three batches, plain clients and hostile ones draw their steps from hypothesis;
after each, all of Redis is looked at (tests/kit/protocol/model_judge.py says what must be true).
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import redis
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kit.protocol.model_judge import Judge
from kit.protocol.model_world import ENDINGS, SCRIPTS, World
from kit.protocol.wire import Fate, load
from kit.redis_servers.wrong_clock import WrongClock, steppable_clock

from contract import naming
from contract.redis import keys
from demo.stack import RedisServer

RESULTS = Path(__file__).parent / "results" / "protocol-model.json"
SEED = int(os.environ.get("WARMQ_TEST_SEED") or secrets.randbelow(2**31))
STEPS = int(os.environ.get("WARMQ_TEST_STEPS") or 100_000)
STEPS_AN_EXAMPLE = 60

#: Most calls are answered; of the others each kind has its turn, at any script of an action.
FATES = st.sampled_from([Fate.ANSWERED] * 6 + list(Fate)[1:])
SPARE = st.integers(0, 3)
BATCH = st.sampled_from(["b0", "b1", "b2"])
WORKER = st.integers(0, 2)
#: 0 is the whole batch.
LINE = st.sampled_from([0, 1, 1, 2, 2, 3, 3, 4, 4])
SOME = st.integers(1, 255)
SIZE = st.sampled_from([1, 3_000, 1_000_000])
PRIORITY = st.sampled_from([0, 6, 9])
RETRIED = st.sampled_from([["failed"], ["failed", "cancelled", "expired"]])
SELDOM = st.sampled_from([False] * 5 + [True])
STEP_S = st.sampled_from([-600, 600, -2, 2])


def there(key: str) -> Callable[[Protocol], bool]:
    """Return a precondition: this key was there after the last step."""
    return lambda self: key.encode() in self.judge.before.held


def leased(self: Protocol) -> bool:
    return bool(self.judge.before.workers())


def known(self: Protocol) -> bool:
    return any(worker.known for worker in self.world.workers)


class Protocol(RuleBasedStateMachine):
    """Hypothesis draws the steps; the class's attributes are set by the fixture below."""

    client: redis.Redis
    shas: dict[str, str]
    clock: WrongClock | None = None
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.client, self.shas)
        self.judge = Judge()

    # -- producers and clients --------------------------------------------------------

    @rule(batch=BATCH, lines=st.integers(0, 3), bad=st.integers(0, 1), priority=PRIORITY,
          late=SELDOM, seal=st.booleans(), fate=FATES, spare=SPARE)  # fmt: skip
    def submit(
        self, batch: str, lines: int, bad: int, priority: int, late: bool, seal: bool, fate: Fate,
        spare: int,
    ) -> None:  # fmt: skip
        def act() -> None:
            self.world.submit(batch, lines, bad, priority, late=late)
            if seal:
                self.world.seal(batch)

        self.world.attempt(act, fate, spare)

    @precondition(there(keys.BATCHES))
    @rule(batch=BATCH, fate=FATES)
    def seal(self, batch: str, fate: Fate) -> None:
        self.world.attempt(lambda: self.world.seal(batch), fate, 0)

    @precondition(there(keys.BATCHES))
    @rule(batch=BATCH, line=LINE, fate=FATES, spare=SPARE)
    def cancel(self, batch: str, line: int, fate: Fate, spare: int) -> None:
        self.world.attempt(lambda: self.world.cancel(batch, line), fate, spare)

    @precondition(there(keys.BATCHES))
    @rule(batch=BATCH, outcomes=RETRIED, fate=FATES, spare=SPARE)
    def retry(self, batch: str, outcomes: list[str], fate: Fate, spare: int) -> None:
        self.world.attempt(lambda: self.world.retry(batch, outcomes), fate, spare)

    @precondition(there(keys.BATCHES))
    @rule(batch=BATCH, fate=FATES, spare=SPARE)
    def retry_cut(self, batch: str, fate: Fate, spare: int) -> None:
        self.world.attempt(lambda: self.world.retry_cut(batch), fate, spare)

    @precondition(there(keys.BATCHES))
    @rule(batch=BATCH, force=SELDOM, fate=FATES, spare=SPARE)
    def delete(self, batch: str, force: bool, fate: Fate, spare: int) -> None:
        self.world.attempt(lambda: self.world.delete(batch, force=force), fate, spare)

    @precondition(there(keys.DEAD))
    @rule(fate=FATES, spare=SPARE)
    def retry_dead(self, fate: Fate, spare: int) -> None:
        self.world.attempt(self.world.retry_dead, fate, spare)

    @rule(priority=PRIORITY, ignored=SELDOM)
    def send(self, priority: int, ignored: bool) -> None:
        self.world.send(priority, ignored=ignored)

    @rule(batch=BATCH, line=LINE, kind=st.integers(0, 3))
    def forge(self, batch: str, line: int, kind: int) -> None:
        self.world.forge(batch, line, kind)

    # -- workers ----------------------------------------------------------------------

    @rule(worker=WORKER, k=st.integers(0, 5), max_bytes=SIZE, fate=FATES)
    def pop(self, worker: int, k: int, max_bytes: int, fate: Fate) -> None:
        popper = self.world.workers[worker]
        self.world.attempt(lambda: self.world.pop(popper, k, max_bytes), fate, 0)

    @precondition(there(keys.BATCHES))
    @rule(worker=WORKER, batch=BATCH, fate=FATES)
    def remove_ended(self, worker: int, batch: str, fate: Fate) -> None:
        self.world.attempt(lambda: self.world.remove_ended(worker, batch), fate, 0)

    @rule(worker=WORKER, k=st.integers(1, 5), ending=st.sampled_from(ENDINGS), fate=FATES,
          spare=SPARE)  # fmt: skip
    def work(self, worker: int, k: int, ending: str, fate: Fate, spare: int) -> None:
        at_work = self.world.workers[worker]
        self.world.attempt(lambda: self.world.work(at_work, k, ending), fate, spare)

    @precondition(there(keys.suspects_list(naming.DEFAULT_QUEUE)))
    @rule(worker=WORKER, k=st.integers(1, 2), ending=st.sampled_from(ENDINGS), fate=FATES,
          spare=SPARE)  # fmt: skip
    def run_suspects(self, worker: int, k: int, ending: str, fate: Fate, spare: int) -> None:
        at_work = self.world.workers[worker]
        self.world.attempt(lambda: self.world.work(at_work, k, ending, suspects=True), fate, spare)

    @precondition(known)
    @rule(worker=WORKER, which=SOME, ending=st.sampled_from(ENDINGS), fate=FATES)
    def end(self, worker: int, which: int, ending: str, fate: Fate) -> None:
        at_work = self.world.workers[worker]
        self.world.attempt(lambda: self.world.end(at_work, which, ending), fate, 0)

    @precondition(leased)
    @rule(worker=WORKER, fate=FATES, spare=SPARE)
    def renew(self, worker: int, fate: Fate, spare: int) -> None:
        renewer = self.world.workers[worker]
        self.world.attempt(lambda: self.world.renew(renewer), fate, spare)

    @precondition(known)
    @rule(worker=WORKER, fate=FATES)
    def bury(self, worker: int, fate: Fate) -> None:
        burier = self.world.workers[worker]
        self.world.attempt(lambda: self.world.bury(burier), fate, 0)

    @precondition(leased)
    @rule(worker=WORKER, dies=st.booleans(), seen=st.booleans())
    def fall_silent(self, worker: int, dies: bool, seen: bool) -> None:
        self.world.fall_silent(worker, dies=dies)
        if seen:
            self.world.sweep(self.world.workers[worker - 1], 500, allowed=True)

    @rule(worker=WORKER, limit=st.sampled_from([1, 2, 500]), allowed=st.booleans(), fate=FATES)
    def sweep(self, worker: int, limit: int, allowed: bool, fate: Fate) -> None:
        sweeper = self.world.workers[worker]
        self.world.attempt(lambda: self.world.sweep(sweeper, limit, allowed=allowed), fate, 0)

    @precondition(there(keys.RETIRING))
    @rule(fate=FATES, spare=SPARE)
    def retire(self, fate: Fate, spare: int) -> None:
        self.world.attempt(self.world.retire, fate, spare)

    # -- what happens to all ------------------------------------------------------------

    @precondition(lambda self: self.world.wire.late)
    @rule(position=SOME)
    def arrive(self, position: int) -> None:
        self.world.arrive(position)

    @rule(what=st.sampled_from(["revoke", "time", "clock", "clock"]), batch=BATCH, line=LINE,
          seconds=STEP_S)  # fmt: skip
    def seldom(self, what: str, batch: str, line: int, seconds: int) -> None:
        if what == "revoke":
            self.world.revoke(batch, line)
        elif what == "time":
            self.world.time_passes(self.world.workers[0])
        elif self.clock is not None:
            self.clock.step(seconds)

    @invariant()
    def nothing_is_wrong(self) -> None:
        type(self).steps += 1
        assert self.judge.objections(self.world) == []

    def teardown(self) -> None:
        assert self.world.come_to_an_end() == []


@pytest.fixture(scope="module")
def protocol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Protocol]]:
    """Return the machine with a Redis whose clock can step, where a compiler is."""
    folder = tmp_path_factory.mktemp("model")
    Protocol.clock = steppable_clock(folder / "clock")
    binary = Protocol.clock.binary if Protocol.clock else None
    with RedisServer(folder / "redis", "--appendonly", "no", binary=binary) as server:
        Protocol.client = server.client()
        Protocol.shas = load(Protocol.client, *SCRIPTS)
        yield Protocol
        Protocol.client.close()


def settings(examples: int, **more: object) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples, stateful_step_count=STEPS_AN_EXAMPLE, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck), print_blob=True, **more,
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_any_order_of_steps_and_lost_replies_keeps_the_invariants(
    protocol: type[Protocol],
) -> None:
    run_state_machine_as_test(protocol, settings=settings(120, derandomize=True))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_steps_keep_the_invariants(protocol: type[Protocol]) -> None:
    sys.stderr.write(f"WARMQ_TEST_SEED={SEED}\n")
    protocol.steps, began = 0, time.monotonic()
    run_state_machine_as_test(
        hypothesis.seed(SEED)(protocol), settings=settings(STEPS // STEPS_AN_EXAMPLE * 13 // 10)
    )
    seconds = time.monotonic() - began
    assert protocol.steps >= STEPS
    figures = {"seed": SEED, "steps": protocol.steps, "seconds": round(seconds, 1),
               "clock_steps": protocol.clock is not None}  # fmt: skip
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
