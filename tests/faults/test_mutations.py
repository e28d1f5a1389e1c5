"""What guards the promise is needed: without it the observers see the promise broken.

Each scenario runs twice: with the code as it is, and with workers that run a copy whose
Lua lacks one guard. The first must pass, the second must fail.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kit.campaigns.mutations import (
    CHARGE,
    GRACE,
    GUARDS,
    NX,
    OWNED,
    BrokenPromise,
    Mutation,
    root_with,
)
from kit.protocol import script_keys
from kit.protocol.lessee import chat, client_of, now
from kit.stacks.stage import Stage, stage
from kit.verdicts.fairness import unfair
from kit.verdicts.observer import read_writes

from demo.stack import ROOT, Worker, eventually


def judge(on: Stage) -> None:
    """Raise BrokenPromise if a result changed or was written by the wrong worker."""
    writes = read_writes(on.server.folder)
    if writes.changed or writes.usurped:
        raise BrokenPromise(f"changed {len(writes.changed)}, usurped {len(writes.usurped)}")


def swept_while_paused(on: Stage, paused: Worker) -> Iterator[None]:
    """Stop a worker until another one runs what it held; let it go on when resumed."""
    held = on.computed().began_on(paused.pid)
    lease_hash = script_keys.worker_key(on.id_of(paused))
    os.kill(paused.pid, signal.SIGSTOP)
    eventually(lambda: not client_of(on.store).exists(lease_hash), 20, "its leases were swept")
    eventually(lambda: any(on.computed().starts[rid] > 1 for rid in held), 20, "begun elsewhere")
    yield
    os.kill(paused.pid, signal.SIGCONT)


def two_answers_to_one_request(on: Stage, root: Path) -> None:
    """A worker is stopped with results almost there; another one answers; it goes on."""
    paused = on.worker(root=root)
    on.ready(paused)
    # Not sealed: a finished batch takes no further answer, whatever the first guard lets pass.
    bodies = [chat(f"q{n}", user="simulate:sleep=2") for n in range(16)]
    submitted = on.submit(bodies, seal=False)
    on.running(16)
    other = on.worker(root=root)
    for _ in swept_while_paused(on, paused):
        eventually(lambda: now(on.store).terminal == 16, 30, "all are answered")
    # A later request through both: then the first one has told all that it knew
    eventually(lambda: on.computed().ends.total() >= 32, 20, "both have answered")
    assert [paused.stop(), other.stop()] == [0, 0]
    assert on.store.seal(submitted.batch, submitted.end).answer == "ok"
    judge(on)


def a_failure_from_a_worker_without_the_lease(on: Stage, root: Path) -> None:
    """The stopped worker's attempt fails after its lease has gone to one that succeeds."""
    paused = on.worker(root=root, simulated_behavior="simulate:fail=2")
    on.ready(paused)
    on.submit(16)
    on.running(16)
    other = on.worker(root=root, simulated_behavior="simulate:sleep=2")
    for _ in swept_while_paused(on, paused):
        pass
    on.finish()
    assert [paused.stop(), other.stop()] == [0, 0]
    judge(on)
    batch = on.store.batch("b1")
    assert batch is not None
    if batch.number("failed"):
        raise BrokenPromise(f"{batch.number('failed')} failed")


def living_workers_over_a_pause_of_redis(on: Stage, root: Path) -> None:
    """Redis stands still for longer than the lease: nobody died, nothing may run again."""
    workers = [on.worker(root=root) for _ in range(3)]
    on.ready(*workers)
    on.submit([chat(f"q{n}", user="simulate:sleep=4.5") for n in range(48)])
    on.running(48)
    server = on.server.process
    assert server is not None
    server.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 3
    eventually(lambda: time.monotonic() > until, what="longer than the lease")
    server.send_signal(signal.SIGCONT)
    on.finish()
    assert [w.stop() for w in workers] == [0, 0, 0]
    judge(on)
    if on.computed().again:
        raise BrokenPromise(f"{on.computed().again} computed again")


def one_whose_requests_all_fail(on: Stage, root: Path) -> None:
    """It has its turns, and others theirs."""
    on.submit([chat(f"q{n}", user="simulate:fail=0.05") for n in range(300)], "b2", tenant="fails")
    on.submit(60, tenant="works")
    worker = on.worker(root=root, simulated_latency_s=0.05)
    on.finish("b2")
    on.finish()
    assert worker.stop() == 0
    if seen := unfair(on.server.folder, slots=16):
        raise BrokenPromise(str(seen[:3]))


SCENARIOS = [
    pytest.param(two_answers_to_one_request, NX, id="NX"),
    pytest.param(one_whose_requests_all_fail, CHARGE, id="charge_of_a_failure"),
    pytest.param(
        a_failure_from_a_worker_without_the_lease,
        OWNED,
        id="lease_of_a_failure",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        living_workers_over_a_pause_of_redis,
        GRACE,
        id="grace_of_the_sweeper",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_stands_in_its_script(tmp_path: Path, guard: str) -> None:
    assert root_with(tmp_path, GUARDS[guard]).is_dir()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("scenario", "mutation"), SCENARIOS)
def test_without_one_guard_the_promise_is_seen_to_break(
    tmp_path: Path, scenario: Callable[[Stage, Path], None], mutation: Mutation
) -> None:
    without = tmp_path / "without"
    without.mkdir()
    # Side by side, each with a Redis of its own: both mostly wait for leases to end
    with stage(tmp_path) as whole, stage(without) as mutant, ThreadPoolExecutor() as pool:
        passing = pool.submit(scenario, whole, ROOT)
        breaking = pool.submit(scenario, mutant, root_with(without, mutation))
        passing.result()
        whole.settled()
        with pytest.raises(BrokenPromise):
            breaking.result()
