"""The commands of docs/how-to as they stand there, with a worker and the simulated engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kit.commands.pages import blocks
from kit.commands.support import producer_env
from kit.stacks.celery_side import simulated

from demo.stack import ROOT

#: Each page whose commands run here, and a file that they make.
PAGES = {
    "deadlines": "prompts.jsonl",
    "label-a-table": "all-labels.parquet",
    "openai-batch-file": "answers.jsonl",
    "operations": "large.answers.jsonl",
    "planning": "requests.jsonl",
    "several-people": "reports.jsonl",
    "slow": None,
    "structured-output": "dated.jsonl",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_succeed_one_after_another(
    page: str, redis_url: str, tmp_path: Path
) -> None:
    text = (ROOT / "docs/how-to" / f"{page}.md").read_text()
    unmarked = [block for block in blocks(text) if not block.options.keys() & {"run", "not-run"}]
    typed = [block.text for block in unmarked if block.language == "sh"]
    assert typed
    env = producer_env(redis_url)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    with simulated(redis_url, tmp_path / "worker.log"):
        done = subprocess.run(
            ["bash", "-euc", "\n".join(typed)],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    if made := PAGES[page]:
        assert (tmp_path / made).stat().st_size > 0
    if page == "label-a-table":
        found = pq.read_table(tmp_path / "all-labels.parquet")
        given = pq.read_schema(tmp_path / "labels.parquet")
        assert found.column("id").to_pylist() == [7, 8, 9]
        assert set(found.column("status").to_pylist()) == {"completed"}
        assert (set(found.schema.names), found.schema.field("line").type) == (
            set(given.names), given.field("line").type
        )  # fmt: skip
