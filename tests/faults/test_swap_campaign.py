"""The short form of the campaign of swaps; `make faults-swaps-full` runs the long one."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from pathlib import Path

import pytest
from kit.campaigns.swap_campaign import Steps, SwapCampaign
from kit.campaigns.swap_campaign_real import RealSwapCampaign, by_other_models
from kit.stacks.stage import stage

from demo.stack import Worker

#: WARMQ_TEST_SEED=N draws the faults of a campaign that failed again.
SEED = int(os.environ.get("WARMQ_TEST_SEED") or secrets.randbelow(2**31))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [pytest.param(SEED, id=f"seed_{SEED}")])
def test_faults_in_each_phase_of_a_swap_lose_nothing(tmp_path: Path, seed: int) -> None:
    with stage(tmp_path, "--appendfsync", "always") as on:
        report = SwapCampaign(on, seed, faults=10, requests=0).run()
    assert report.faults.total() == 10
    assert report.broken() == {}


def test_answers_by_another_model_are_counted_by_their_prompt_tokens() -> None:
    models = {"short": 5, "middle": 8, "long": 12}
    right = {(m, c): Counter({tokens + n: 3}) for m, tokens in models.items()
             for n, c in enumerate(("c1", "c2"))}  # fmt: skip
    assert by_other_models(right) == 0
    assert by_other_models(right | {("long", "c2"): Counter({13: 3, 9: 1})}) == 1
    # `long` and `middle` have the same numbers: either may be wrong, so all of c1 count.
    assert by_other_models(right | {("long", "c1"): Counter({8: 3})}) == 9


def test_a_fault_of_a_starting_engine_waits_for_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[str] = []
    monkeypatch.setattr(RealSwapCampaign, "engine_parts_now", lambda *_: parts)
    campaign = object.__new__(RealSwapCampaign)
    worker = Worker("redis://nowhere", tmp_path / "worker.log")
    worker.log_path.write_text("swapping from model short to long\n")
    campaign._steps = {worker: Steps(worker)}
    campaign.phase, campaign.of_engine = "starting the engine", True
    parts.append("EngineCore")
    assert not campaign.arrived(worker, 0.0)  # the engine of the model before
    parts.clear()
    with worker.log_path.open("a") as log:
        log.write("model long is loaded, of short, long\n")
    assert not campaign.arrived(worker, 0.0)
    parts.append("EngineCore")
    assert campaign.arrived(worker, 0.0)
