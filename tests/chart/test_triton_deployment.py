"""Triton's compose file: what a schema cannot check."""

from __future__ import annotations

import yaml

from demo.stack import ROOT, procfile_command
from worker.drain.lifecycle import STOP_S
from worker.engine.triton import TritonSettings

SERVICES = yaml.safe_load((ROOT / "compose" / "compose.triton.yaml").read_text())["services"]
WORKER, TRITON = SERVICES["worker"], SERVICES["triton"]


def test_the_worker_asks_the_server_that_is_started_for_the_model_that_is_loaded() -> None:
    settings = {name.removeprefix("WARMQ_").lower() for name in WORKER["environment"]}
    assert settings <= TritonSettings.model_fields.keys()
    assert WORKER["environment"]["WARMQ_ENGINE"] == "triton"
    assert WORKER["environment"]["WARMQ_TRITON_URL"] == "triton:8001"
    loaded = TritonSettings.model_fields["triton_model"].default
    assert f"--load-model={loaded}" in TRITON["command"]
    assert "--model-control-mode=explicit" in TRITON["command"]


def test_the_worker_is_started_as_the_procfile_says_and_may_finish_its_drain() -> None:
    assert WORKER["command"].split()[1:] == procfile_command()[1:]
    drain_s = float(WORKER["environment"]["WARMQ_DRAIN_TIMEOUT_S"])
    assert int(WORKER["stop_grace_period"].removesuffix("s")) > drain_s + STOP_S


def test_triton_is_reached_from_the_workers_network_only() -> None:
    assert TRITON["networks"] == ["queue"]
    assert "ports" not in TRITON and "network_mode" not in TRITON
    assert "privileged" not in TRITON


def test_what_the_servers_repository_names_is_where_the_server_finds_it() -> None:
    (models,) = TRITON["volumes"]
    outside, inside, _ = models.replace(":-", "=").split(":")
    assert outside == inside
    assert any(word.endswith("/repository") for word in TRITON["command"])
