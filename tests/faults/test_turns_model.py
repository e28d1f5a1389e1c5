"""Turns against a model: any order of endings, cancels, weights, caps and newcomers.

No counter drifts; whoever was served least is served next, within a tenant after what is urgent; a
newcomer waits for at most a turn of each that was there before it.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator

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
from kit.campaigns.mutations import TURNS, Mutation
from kit.protocol.turns_model import TurnsModel
from kit.protocol.turns_seen import Seen, place_of
from kit.protocol.turns_world import BODIES, OUTCOMES, SLOTS, TurnsWorld, estimate, lists_held

from contract.redis.scripts import source
from demo.stack import RedisServer

SEED = int(os.environ.get("WARMQ_TEST_SEED") or secrets.randbelow(2**31))
STEPS = int(os.environ.get("WARMQ_TEST_STEPS") or 100_000)
STEPS_AN_EXAMPLE = 60
#: So many rounds end all that such an example can have queued.
MOST_ROUNDS = 200
SCRIPTS = (
    "create", "enqueue", "pop", "done", "release", "sweep", "bury", "cancel", "delete",
    "delete_chunk", "terms_put",
)  # fmt: skip

TENANT = st.sampled_from("abcde")
WHICH = st.integers(0, 1)
WORKER = st.integers(0, 1)
STEP = st.sampled_from([6, 6, 6, 3])
KIND = st.sampled_from(["short", *BODIES])
LINES = st.sampled_from([1, 3, 12, 30])
ENDING = st.sampled_from(["completed"] * 6 + [*OUTCOMES, "buried", "returned", "died", "lost"])
TOKENS = st.sampled_from([0, 0, 1, 10, 100, 100, 5_000, 2**40])
WEIGHT = st.sampled_from([1.0, 1.0, 2.0, 0.5, 0.01, 1000.0])
CAP = st.sampled_from([None, None, 0, 1, 5])
CONTEXT = st.sampled_from([0, 0, 300])
SELDOM = st.sampled_from([False] * 7 + [True])
#: Lists that a worker names as urgent, by their positions.
URGENT = st.just([]) | st.lists(st.integers(0, 19), max_size=3)


class Turns(RuleBasedStateMachine):
    """Hypothesis draws the steps; the class's attributes are set by the fixture below."""

    client: redis.Redis
    shas: dict[str, str]
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.world = TurnsWorld(self.client, self.shas)
        self.model = TurnsModel(SLOTS)
        self.found: list[str] = []

    def look(self) -> Seen:
        return Seen.take(self.client)

    def judge(self) -> None:
        self.found += self.model.moved(self.look())

    @rule(tenant=TENANT, which=WHICH, step=STEP, lines=LINES, kind=KIND, late=SELDOM)
    def submit(self, tenant: str, which: int, step: int, lines: int, kind: str, late: bool) -> None:
        self.world.submit(tenant, which, step, lines, kind, late=late)
        self.judge()

    @rule(tenant=TENANT, which=WHICH, step=STEP, line=st.sampled_from([0, 1, 2, 3, 5, 9]))
    def cancel(self, tenant: str, which: int, step: int, line: int) -> None:
        self.world.cancel(tenant, which, step, line)
        self.judge()

    @precondition(lambda self: self.model.seen.length)
    @rule(tenant=TENANT, which=WHICH, step=STEP)
    def delete(self, tenant: str, which: int, step: int) -> None:
        self.world.delete(tenant, which, step)
        self.judge()

    @rule(tenant=TENANT, weight=WEIGHT, cap=CAP)
    def set_terms(self, tenant: str, weight: float, cap: int | None) -> None:
        self.world.set_terms(tenant, weight, cap)
        self.world.sweep()
        self.judge()

    @precondition(lambda self: self.model.seen.waiting)
    @rule(worker=WORKER, k=st.sampled_from([1, 2, 4, 9, 20]), context=CONTEXT, first=URGENT,
          rivals=st.booleans())  # fmt: skip
    def pop(
        self, worker: int, k: int, context: int, first: list[int], rivals: bool = False
    ) -> None:
        """Lease; `rivals`: the other lists of the tenant whose turn goes on are urgent."""
        going_on, lists = self.world.going_on(worker), sorted(self.model.seen.length)
        urgent = [lists[n % len(lists)] for n in first] if lists else []
        if rivals and going_on[1]:
            place = place_of(going_on[0])
            urgent += [one for one in lists if place_of(one) == place and one != going_on[0]]
        urgent = list(dict.fromkeys(urgent))
        leases, seen = self.world.pop(worker, k, context, urgent), self.look()
        charges = [seen.leases[lease.id] for lease in leases]
        for lease, charge in zip(leases, charges, strict=True):
            expected = estimate(self.model.seen, charge.list, lease.message, context)
            if charge.cost != expected:
                self.found.append(f"{lease.id} was charged {charge.cost}, not {expected}")
        self.found += self.model.popped(charges, going_on, k, seen, urgent)

    @precondition(lambda self: self.model.seen.length)
    @rule(worker=WORKER, which=WHICH)
    def remove_ended(self, worker: int, which: int) -> None:
        """Remove messages that need no model, of about half of the lists."""
        self.world.workers[worker].remove_ended(*sorted(self.model.seen.length)[which::2])
        self.found += self.model.popped([], ("", 0), 0, self.look())

    @precondition(lambda self: self.model.seen.leases)
    @rule(worker=WORKER, which=st.integers(0, 9), most=st.sampled_from([1, 2, 30]), ending=ENDING,
          tokens=TOKENS)  # fmt: skip
    def end(self, worker: int, which: int, most: int, ending: str, tokens: int) -> None:
        seen = self.model.seen
        if not (held := lists_held(seen, self.world.workers[worker].worker)):
            return
        list_key = sorted(held)[which % len(held)]
        chosen = sorted(held[list_key], key=lambda lease: int(lease.rpartition("/")[2]))[:most]
        if ending == "buried":
            chosen = chosen[:1]
        ends = self.world.end(worker, chosen, ending, tokens, seen)
        self.found += self.model.ended(ends, self.look())

    @invariant()
    def nothing_is_wrong(self) -> None:
        type(self).steps += 1
        assert self.found == []

    def teardown(self) -> None:
        """Let everything come to its end, a newcomer's request too: nobody has lost its turn."""
        if self.found:
            return
        for tenant in "abcde":
            self.set_terms(tenant, 1.0, None)
        self.submit("z", 0, 3, 1, "short", False)
        for _ in range(MOST_ROUNDS):
            for worker in (0, 1):
                self.pop(worker, 20, 0, [])
                for which in range(len(self.world.workers)):
                    self.end(worker, which, 30, "completed", 10)
            self.nothing_is_wrong()
            if not self.model.seen.waiting and not self.model.seen.leases:
                break
        seen = self.model.seen
        assert (seen.waiting, seen.leases, seen.lists, seen.in_flight) == (0, {}, {}, {})


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    folder = tmp_path_factory.mktemp("turns")
    with RedisServer(folder / "redis", "--appendonly", "no") as server, server.client() as client:
        yield client


def machine(client: redis.Redis, without: Mutation | None = None) -> type[Turns]:
    """Return the machine over the scripts as they are, or with one guard removed."""
    texts = {name: source(name) for name in SCRIPTS}
    if without is not None:
        _, guard, instead = without
        assert any(guard in text for text in texts.values())
        texts = {name: text.replace(guard, instead) for name, text in texts.items()}
    shas = {name: client.script_load(text) for name, text in texts.items()}
    return type("Turns", (Turns,), {"client": client, "shas": shas})


def settings(examples: int, **more: object) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples, stateful_step_count=STEPS_AN_EXAMPLE, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck), print_blob=True, **more,
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_no_counter_drifts_and_nobody_is_kept_waiting(own_redis: redis.Redis) -> None:
    run_state_machine_as_test(machine(own_redis), settings=settings(40, derandomize=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("guard", TURNS)
def test_the_model_sees_what_is_missing(own_redis: redis.Redis, guard: str) -> None:
    only = (hypothesis.Phase.generate,)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine(own_redis, TURNS[guard]), settings=settings(200, derandomize=True, phases=only)
        )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_steps_of_turns(own_redis: redis.Redis) -> None:
    sys.stderr.write(f"WARMQ_TEST_SEED={SEED}\n")
    turns = machine(own_redis)
    run_state_machine_as_test(
        hypothesis.seed(SEED)(turns), settings=settings(STEPS // STEPS_AN_EXAMPLE * 13 // 10)
    )
    assert turns.steps >= STEPS
