"""The GPU's compose file and image: what a schema cannot check."""

from __future__ import annotations

import re

import pytest
import yaml

from contract.settings import load
from demo.stack import ROOT
from worker.drain.lifecycle import STOP_S
from worker.engine.vllm_settings import VllmSettings

COMPOSE = yaml.safe_load((ROOT / "compose" / "compose.gpu.yaml").read_text())
WORKER = COMPOSE["services"]["worker"]
IMAGE = (ROOT / WORKER["build"]["dockerfile"]).read_text()
KILL_GRACE_S = 5
MADE_BY_COMPOSE = re.compile(r"\$\{[A-Z_]+:-(.*)\}")


def test_one_gpu_is_reserved_and_the_container_has_no_privileges() -> None:
    devices = WORKER["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert "privileged" not in WORKER
    assert "USER warmq" in IMAGE


def test_the_worker_runs_the_procfiles_line_with_settings_that_load() -> None:
    assert WORKER["command"] in (ROOT / "Procfile").read_text()
    settings = {
        name.removeprefix("WARMQ_").lower(): MADE_BY_COMPOSE.sub(r"\1", str(value))
        for name, value in WORKER["environment"].items()
        if name != "WARMQ_REDIS_URL"
    }
    assert set(settings) <= set(VllmSettings.model_fields)
    loaded = load(VllmSettings, **settings)
    assert loaded.model == "/models/Llama-3.1-8B-Instruct"
    assert loaded.engine_args.options == {"max-num-seqs": "256"}
    grace = int(WORKER["stop_grace_period"].removesuffix("s"))
    assert grace > loaded.drain_timeout_s + KILL_GRACE_S + STOP_S


@pytest.mark.parametrize("image", ["worker", "worker.cuda", "worker.npu"])
def test_a_containers_log_has_vllms_log(image: str) -> None:
    lines = (ROOT / "compose" / f"{image}.Dockerfile").read_text().splitlines()
    assert any(line.startswith("ENV WARMQ_ENGINE_LOG=- ") for line in lines)


def test_the_image_is_installed_from_the_locks_alone() -> None:
    assert "scripts/setup base gateway engine cuda\n" in IMAGE
    assert "pip install" not in IMAGE
    for name in ("base", "engine", "cuda"):
        lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        pins = [line for line in lines if line and line[0] not in " #"]
        assert pins and all("==" in line and line.endswith("\\") for line in pins)


def test_the_cuda_lock_shares_no_package_with_the_others() -> None:
    def names(lock: str) -> set[str]:
        text = (ROOT / "requirements" / f"{lock}.txt").read_text()
        return set(re.findall(r"^([a-z0-9._-]+)==", text, re.MULTILINE))

    cuda = names("cuda")
    assert {"vllm", "torch", "triton", "flashinfer-python"} <= cuda
    for lock in ("base", "build", "engine", "dev"):
        assert not cuda & names(lock)
