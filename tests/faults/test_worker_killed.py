"""kill -9 of workers: everything ends once, little is computed again, soon."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kit.stacks.stage import Stage, stage

from demo.stack import Worker, eventually

#: Requests a worker of the stage may have computed in vain: its slots and its look-ahead.
HELD = 16 + 4
#: A gap between sweeps longer than a third of this delays redelivery by one more lease, and a busy
#: machine can leave a worker without a core for most of a second.
LEASE_S = 6


def interrupted_by_kill(on: Stage, victim: Worker, *, group: bool) -> set[str]:
    """Kill a worker and return what it had begun and not answered."""
    begun = on.running(60).began_on(victim.pid)
    if group:
        on.kill_group(victim)
    else:
        on.kill(victim)
    begun |= on.computed().began_on(victim.pid)
    answered = [raw is not None for raw in on.store.results(list(begun))]
    return {rid for rid, known in zip(list(begun), answered, strict=True) if not known}


def seconds_until_begun_again(on: Stage, requests: set[str]) -> float:
    began = time.monotonic()

    def again() -> bool:
        starts = on.computed().starts
        return any(starts[rid] > 1 for rid in requests)

    eventually(again, LEASE_S + 15, "a redelivered request starts")
    return time.monotonic() - began


@pytest.mark.parametrize("group", [False, True], ids=["worker", "process_group"])
def test_what_a_killed_worker_held_runs_on_another_within_the_lease_and_2_seconds(
    tmp_path: Path, group: bool
) -> None:
    with stage(tmp_path) as on:
        victim, other = (on.worker(simulated_process=True, lease_s=LEASE_S) for _ in range(2))
        on.ready(victim, other)
        on.submit(400)
        interrupted = interrupted_by_kill(on, victim, group=group)
        assert interrupted
        assert seconds_until_begun_again(on, interrupted) <= LEASE_S + 2
        on.finish()
        assert 0 < on.computed().again <= HELD
        assert other.stop() == 0
        on.settled()


def test_a_worker_that_was_alone_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        first = on.worker(lease_s=LEASE_S)
        on.ready(first)
        on.submit(200)
        interrupted = interrupted_by_kill(on, first, group=False)
        # Nobody sweeps meanwhile; the next one waits one lease, in case others still live
        second = on.worker(lease_s=LEASE_S)
        on.ready(second)
        assert seconds_until_begun_again(on, interrupted) <= LEASE_S + 2
        on.finish()
        assert on.computed().again <= HELD
        assert second.stop() == 0
        on.settled()


@pytest.mark.timeout(120)
def test_killed_one_after_the_other_workers_lose_nothing(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.ready(*(on.worker() for _ in range(2)))
        on.submit(600)
        for kills in range(1, 5):
            on.running(90 * kills)
            on.kill(on.workers[-2])
            on.ready(on.worker())
        on.finish()
        assert on.computed().again <= 4 * HELD
        assert [w.stop() for w in on.workers[-2:]] == [0, 0]
        on.settled()
