"""The compose file of the openai engine: what a schema cannot check."""

from __future__ import annotations

import re
import shlex

import yaml
from kit.servers.vllm_server import MODULE

from contract.settings import load
from demo.stack import ROOT
from worker.drain.lifecycle import STOP_S
from worker.engine.openai import OpenAISettings

TEXT = (ROOT / "compose" / "compose.openai.yaml").read_text()
SERVICES = yaml.safe_load(TEXT)["services"]


def test_server_and_worker_share_one_key_that_nobody_wrote_down() -> None:
    assert SERVICES["vllm"]["environment"]["VLLM_API_KEY"].startswith("${WARMQ_OPENAI_API_KEY:?")
    assert SERVICES["worker"]["environment"]["WARMQ_OPENAI_API_KEY"] == "${WARMQ_OPENAI_API_KEY}"
    assert "--api-key" not in str(SERVICES["vllm"]["command"])
    assert "ports" not in SERVICES["vllm"]


def test_the_worker_runs_the_procfiles_line_with_settings_that_load() -> None:
    worker = SERVICES["worker"]
    assert worker["command"] in (ROOT / "Procfile").read_text()
    names = {name: str(value) for name, value in worker["environment"].items()}
    settings = {
        name.removeprefix("WARMQ_").lower(): value
        for name, value in names.items()
        if not value.startswith(("${", "redis:"))
    }
    assert set(settings) <= set(OpenAISettings.model_fields)
    loaded = load(OpenAISettings, **settings)
    assert loaded.base_urls == ["http://vllm:8000/v1"]
    grace = int(worker["stop_grace_period"].removesuffix("s"))
    assert grace > loaded.drain_timeout_s + STOP_S


def test_the_pages_server_is_the_one_that_the_tests_start() -> None:
    page = (ROOT / "docs/reference/engine-openai.md").read_text()
    (command,) = re.findall(r"^(python -m vllm\S+ (?:.*\\\n)*.*)", page, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", ""))
    assert words[2] == MODULE
    assert (ROOT / words[words.index("--model") + 1] / "config.json").is_file()
    key, port = (words[words.index(option) + 1] for option in ("--api-key", "--port"))
    assert f"OPENAI_API_KEY={key}" in page and f"http://127.0.0.1:{port}/v1" in page


def test_the_image_needs_no_engine() -> None:
    image = (ROOT / SERVICES["worker"]["build"]["dockerfile"]).read_text()
    assert "scripts/setup base openai traces\n" in image
    locked = (ROOT / "requirements" / "openai.txt").read_text()
    assert "\naiohttp==" in locked
    engine = "".join(
        (ROOT / "requirements" / f"{name}.txt").read_text() for name in ("gateway", "engine")
    )
    blocks = [b for b in locked.split("\n") if b and not b.startswith("#")]
    assert not [line for line in blocks if line not in engine]
