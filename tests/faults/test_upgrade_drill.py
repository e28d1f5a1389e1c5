"""The short form of the upgrade drill; `make upgrade-full` runs the long one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from observer import read_writes
from previous import Previous
from settled import assert_batch_settled, assert_nothing_left
from stage import stage
from upgrade_drill import NEW, OLD, UpgradeDrill

#: WARMQ_TEST_SEED=N draws the faults of a drill that failed again.
SEED = int(os.environ.get("WARMQ_TEST_SEED") or secrets.randbelow(2**31))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [pytest.param(SEED, id=f"seed_{SEED}")])
def test_workers_and_producers_of_both_releases_lose_nothing_and_commit_nothing_twice(
    tmp_path: Path, previous: Previous, seed: int
) -> None:
    with stage(tmp_path, "--appendfsync", "always") as on:
        report = UpgradeDrill(on, previous, seed, requests=2_000, faults=6).run()
    assert report.faults.total() == 6
    assert min(report.while_both_served[release] for release in (OLD, NEW)) > 0


@pytest.mark.timeout(120)
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
