"""The short form of the soak: ten tenants at the real engine, one of them hostile.

run_soak.py is the long one. WARMQ_TEST_SEED=N draws the requests of a run that failed again.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from kit.hostile.attacked import attacked
from kit.hostile.soak import Soak

#: Others' time is judged, which other suites beside it spoil: `make faults-full` runs it.
pytestmark = pytest.mark.slow
SEED = int(os.environ.get("WARMQ_TEST_SEED") or secrets.randbelow(2**31))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [pytest.param(SEED, id=f"seed_{SEED}")])
def test_nine_honest_tenants_do_not_notice_the_tenth(seed: int, tmp_path: Path) -> None:
    with attacked(tmp_path) as on:
        report = Soak(on, seed).run(8, 16)
    assert report.broken() == {}, report.text()
