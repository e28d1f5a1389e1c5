"""A short campaign of kills of gateways, carriers and Redis: no line lost, none doubled.

`make faults-gateway-full` is the long one. Clients go on until a kill has met each phase, which on
a busy machine takes minutes: so this is none of the short tests.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from kit.campaigns.gateway_campaign import GatewayCampaign
from kit.campaigns.gateway_phases import PHASES
from kit.campaigns.gateway_verdict import judge

#: WARMQ_TEST_SEED=N draws the kills of a campaign that failed again.
SEED = int(os.environ.get("WARMQ_TEST_SEED") or secrets.randbelow(2**31))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [pytest.param(SEED, id=f"seed_{SEED}")])
def test_a_kill_in_each_phase_loses_and_doubles_nothing(seed: int, tmp_path: Path) -> None:
    report = GatewayCampaign(tmp_path, seed, len(PHASES), redis_kills=1, most_lines=800).run(judge)
    # How fast another one takes over is judged where nothing else uses the machine.
    assert report.broken().keys() <= {"slow_takeovers", "robbed"}
    assert {phase for phase in PHASES if report.phases[phase]} == set(PHASES)
    assert report.kills["redis"] == 1
