"""The program of docs/how-to/openai-batch-file.md as it stands there: only the port differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kit.commands.pages import blocks
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import simulated

from demo.stack import ROOT, RedisServer

#: As the page sets it.
GATEWAY_SETTINGS = {"gateway_models": "gpt-4o-mini="}


@pytest.mark.timeout(120)
def test_the_pages_program_runs_a_file_and_streams_a_chat(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    page = (ROOT / "docs/how-to/openai-batch-file.md").read_text()
    assert f"WARMQ_GATEWAY_MODELS={GATEWAY_SETTINGS['gateway_models']}\n" in page
    (program,) = [block.text for block in blocks(page) if block.language == "python"]
    makes_file, _ = next(blocks(page)).text.split("producer submit")
    subprocess.run(["bash", "-euc", makes_file], cwd=tmp_path, check=True)
    with simulated(redis_server.url, tmp_path / "worker.log", model="models/tiny"):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("http://127.0.0.1:8000", gateway.url)],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {line["custom_id"] for line in answers} == {"a", "b"}
    assert {line["response"]["status_code"] for line in answers} == {200}
    assert not done.stdout.splitlines()[-1].startswith("{")  # the chat's text
