"""The programs of two pages as they stand there, against a gateway and the README's worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from kit.commands.pages import blocks
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import simulated

from demo.stack import ROOT, RedisServer, eventually

PAGE, REFERENCE = "docs/how-to/openai-batch-file.md", "docs/reference/gateway.md"


def answers_of(page: str, gateway: GatewayProcess, redis_url: str, folder: Path) -> list[str]:
    """Run a page's Python with only the port changed; return what it prints."""
    text = (ROOT / page).read_text()
    program = "\n".join(one.text for one in blocks(text) if one.language == "python")
    with simulated(redis_url, folder / "worker.log", model="models/tiny"):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("http://127.0.0.1:8000", gateway.url)],
            cwd=folder, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

        def served() -> bool:
            models = httpx.get(f"{gateway.url}/v1/models").json()["data"]
            return [model["id"] for model in models] == ["tiny"]

        eventually(served, 30, "the worker is ready, and its model has one name")
    return done.stdout.splitlines()


@pytest.mark.timeout(120)
def test_the_pages_program_runs_a_file_for_any_model_and_streams_a_chat(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    makes_file, _ = next(blocks((ROOT / PAGE).read_text())).text.split("producer submit")
    subprocess.run(["bash", "-euc", makes_file], cwd=tmp_path, check=True)
    assert "gpt-4o-mini" in (tmp_path / "requests.jsonl").read_text()
    printed = answers_of(PAGE, gateway, redis_server.url, tmp_path)
    answers = [json.loads(line) for line in printed if line.startswith("{")]
    assert {line["custom_id"] for line in answers} == {"a", "b"}
    assert {line["response"]["status_code"] for line in answers} == {200}
    assert not printed[-1].startswith("{")  # the chat's text


@pytest.mark.timeout(120)
def test_the_references_program_makes_a_batch_and_reads_it_while_it_runs(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    answers_of(REFERENCE, gateway, redis_server.url, tmp_path)
