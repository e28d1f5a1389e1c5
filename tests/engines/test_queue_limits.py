"""Requests wait while vLLM refuses more, and none fails for that."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kit.commands.support import producer_command, producer_env
from kit.stacks import real_stack

from demo.stack import CPU_ENGINE_ARGS, tiny_model_worker

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("limit", ["--max-num-queued-reqs 2", "--max-num-queued-tokens 8"])
def test_all_lines_are_answered_by_an_engine_that_takes_few_at_once(
    limit: str, redis_url: str, tmp_path: Path
) -> None:
    lines = [{"prompt": f"Question {n}", "max_tokens": 8} for n in range(40)]
    lines.append({"prompt": "x", "n": 3, "max_tokens": 2, "temperature": 1, "custom_id": "three"})
    source = real_stack.write_jsonl(tmp_path / "in.jsonl", lines)
    args = f"{CPU_ENGINE_ARGS} {limit}"
    with tiny_model_worker(redis_url, tmp_path / "worker.log", engine_args=args):
        out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
        command = producer_command("submit", source, "--wait", "-o", out, "--errors", errors)
        subprocess.run(command, env=producer_env(redis_url), timeout=240, check=False)
    failed = {line["custom_id"]: line["error"] for line in real_stack.read_jsonl(errors)}
    if "tokens" in limit:
        assert failed == {}
    else:  # three never fit in two places
        assert list(failed) == ["three"]
        assert failed["three"]["code"] == "invalid_request"
        assert "3 sequences" in failed["three"]["message"]
    assert len(real_stack.read_jsonl(out)) == 41 - len(failed)
