"""The program of docs/how-to/openai-batch-file.md as it stands there: only the port differs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kit.commands.pages import blocks
from kit.commands.support import batch_file
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import simulated

from demo.stack import ROOT, RedisServer


@pytest.mark.timeout(120)
def test_the_pages_program_runs_a_file_and_streams_a_chat(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    page = (ROOT / "docs/how-to/openai-batch-file.md").read_text()
    (program,) = [block.text for block in blocks(page) if block.language == "python"]
    batch_file(tmp_path / "requests.jsonl", 2, prefix="asked-")
    with simulated(redis_server.url, tmp_path / "worker.log"):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("http://127.0.0.1:8000", gateway.url)],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "asked-0" in done.stdout and "asked-1" in done.stdout
    assert done.stdout.strip().splitlines()[-1]
