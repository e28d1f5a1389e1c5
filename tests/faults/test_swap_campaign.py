"""The short form of the campaign of swaps; `make faults-swaps-full` runs the long one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from kit.campaigns.swap_campaign import SwapCampaign
from kit.stacks.stage import stage

#: WARMQ_TEST_SEED=N draws the faults of a campaign that failed again.
SEED = int(os.environ.get("WARMQ_TEST_SEED") or secrets.randbelow(2**31))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [pytest.param(SEED, id=f"seed_{SEED}")])
def test_faults_in_each_phase_of_a_swap_lose_nothing(tmp_path: Path, seed: int) -> None:
    with stage(tmp_path, "--appendfsync", "always") as on:
        report = SwapCampaign(on, seed, faults=10, requests=0).run()
    assert report.faults.total() == 10
    assert report.broken() == {}
