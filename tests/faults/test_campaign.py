"""The short form of the randomised campaign; `make faults-full` runs the long one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from kit.campaigns.campaign import Campaign
from kit.redis_servers.wrong_clock import steppable_clock
from kit.stacks.stage import stage

#: WARMQ_TEST_SEED=N draws the faults of a campaign that failed again.
SEED = int(os.environ.get("WARMQ_TEST_SEED") or secrets.randbelow(2**31))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [pytest.param(SEED, id=f"seed_{SEED}")])
def test_random_faults_lose_nothing_and_commit_nothing_twice(tmp_path: Path, seed: int) -> None:
    clock = steppable_clock(tmp_path / "clock")
    with stage(tmp_path, "--appendfsync", "always", clock=clock) as on:
        report = Campaign(on, seed, faults=20, requests=3_000).run()
    assert report.faults.total() == 20
    assert report.broken() == {}
