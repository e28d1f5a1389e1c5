"""The short form of the upgrade drill; `make upgrade-full` runs the long one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from previous import Previous
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
