"""The short form of the upgrade drill; `make upgrade-full` runs the long one."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.support import run_producer
from kit.protocol.lessee import client_of
from kit.stacks.previous import Previous, worker_keys
from kit.stacks.stage import stage
from kit.stacks.upgrade_drill import NEW, OLD, UpgradeDrill
from kit.verdicts.observer import read_writes
from kit.verdicts.settled import assert_batch_settled, assert_nothing_left

from demo.stack import eventually

#: WARMQ_TEST_SEED=N draws the faults of a drill that failed again.
SEED = int(os.environ.get("WARMQ_TEST_SEED") or secrets.randbelow(2**31))


def answers(drill: UpgradeDrill, batch_id: str, release: str) -> dict[str, Any]:
    """Return what a release's own command collects of a batch, by custom_id."""
    files = [drill.on.folder / f"{batch_id}.{release}.{name}" for name in ("out", "errors")]
    args = ("results", batch_id, "-o", files[0], "--errors", files[1])
    done = command(drill, release, *args)
    assert done.returncode in (0, 1), done.stderr  # 1: some have failed
    lines = [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]
    assert len(lines) == len(drill.on.bodies[batch_id])
    return {line["custom_id"]: (line["response"], line["error"]) for line in lines}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [pytest.param(SEED, id=f"seed_{SEED}")])
def test_workers_and_producers_of_both_releases_lose_nothing_and_commit_nothing_twice(
    tmp_path: Path, previous: Previous, seed: int
) -> None:
    with stage(tmp_path, "--appendfsync", "always") as on:
        drill = UpgradeDrill(on, previous, seed, requests=2_000, faults=6)
        report = drill.run()
        for batch_id in ("previous-0", list(drill.failing)[-1]):
            assert answers(drill, batch_id, OLD) == answers(drill, batch_id, NEW)
    assert report.faults.total() == 6
    assert min(report.while_both_served[release] for release in (OLD, NEW)) > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [pytest.param(SEED, id=f"seed_{SEED}")])
def test_requests_of_many_answers_are_shared_by_both_releases_and_end_once(
    tmp_path: Path, previous: Previous, seed: int
) -> None:
    """Workers of the release before count each as one; what they leave of the count is ended."""
    with stage(tmp_path, "--appendfsync", "always") as on:
        choices = (1, 2, 8, 40)  # the last is more than an engine has slots
        drill = UpgradeDrill(on, previous, seed, requests=1_000, faults=6, choices=choices)
        report = drill.run()
    assert report.faults.total() == 6
    assert min(report.while_both_served[release] for release in (OLD, NEW)) > 0


@pytest.mark.timeout(600)
def test_a_request_that_kills_engines_is_found_by_workers_of_both_releases(
    tmp_path: Path, previous: Previous
) -> None:
    with stage(tmp_path, "--appendfsync", "always") as on:
        drill = UpgradeDrill(on, previous, SEED, requests=0, faults=0)
        for release in (OLD, NEW):
            drill.add_worker(release)
        for release in (OLD, NEW):
            drill.submit(release, poison=70)
        for batch_id in drill.failing:
            on.finish(batch_id, timeout_s=60)
            assert_batch_settled(
                on.store, batch_id, on.bodies[batch_id], failed=drill.failing[batch_id]
            )
        assert [letter["custom_id"] for letter in on.store.dead_letters()] == ["c70", "c70"]
        writes = read_writes(on.server.folder)
        assert (writes.changed, writes.usurped) == ([], [])
        assert_nothing_left(on.store)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cancels", [OLD, NEW])
@pytest.mark.parametrize("retries", [OLD, NEW])
def test_what_either_release_cancels_of_an_older_batch_either_runs_again(
    tmp_path: Path, previous: Previous, cancels: str, retries: str
) -> None:
    with stage(tmp_path, "--appendfsync", "always") as on:
        drill = UpgradeDrill(on, previous, SEED, requests=0, faults=0)
        for release in (OLD, NEW):
            drill.add_worker(release)
        batch_id = drill.submit(OLD, sleepers=16)
        on.running(60)
        workers = [worker for serving in drill.serving.values() for worker in serving]
        for worker in workers:
            os.kill(worker.pid, signal.SIGSTOP)  # however long the command takes
        assert command(drill, cancels, "cancel", batch_id).returncode == 0
        for worker in workers:
            os.kill(worker.pid, signal.SIGCONT)
        on.finish(batch_id)
        batch = on.store.batch(batch_id)
        assert batch is not None and batch.number("cancelled") > 0
        # What waits is met by a worker, what runs is given up: all messages are with the batch then
        eventually(lambda: not worker_keys(client_of(on.store)), 30, "nothing is in flight")
        failed = ("--include", "cancelled")
        assert command(drill, retries, "retry", batch_id, *failed).returncode == 0
        on.finish(batch_id, timeout_s=90)
        assert_batch_settled(
            on.store, batch_id, on.bodies[batch_id], failed=drill.failing[batch_id]
        )
        assert_nothing_left(on.store)


def command(
    drill: UpgradeDrill, release: str, *args: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run a command of a release."""
    if release == OLD:
        return drill.previous.producer(*args, redis_url=drill.on.server.url)
    return run_producer(*args, redis_url=drill.on.server.url)
