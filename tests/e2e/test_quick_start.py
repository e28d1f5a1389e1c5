"""The quick start of docs/engine-vllm.md, line by line as it stands there."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_stack import ROOT, asked, listed_questions, read_jsonl, text_of, write_jsonl

from demo.stack import RedisServer

pytestmark = pytest.mark.timeout(240)
PAGE = ROOT / "docs" / "engine-vllm.md"


def commands() -> list[list[str]]:
    """Return the words of the indented lines under `Quick start`."""
    section = PAGE.read_text().split("## Quick start")[1].split("\n## ")[0]
    lines = (line for line in section.splitlines() if line.startswith("    "))
    return [shlex.split(line, comments=True) for line in lines]


def test_the_quick_start_of_the_vllm_page_answers_a_file(tmp_path: Path) -> None:
    exports = dict(words[1].split("=", 1) for words in commands() if words[0] == "export")
    check, serve, submit = (words for words in commands() if words[0] != "export")
    questions = listed_questions(8, seed=91)
    write_jsonl(tmp_path / "prompts.jsonl", [asked(question, True) for question in questions])
    with RedisServer(tmp_path / "redis") as server, (tmp_path / "log").open("wb") as log:
        installed = Path(sys.executable).parent
        env = os.environ | exports | {
            "WARMQ_REDIS_URL": server.url, "PATH": f"{installed}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        subprocess.run(check, cwd=ROOT, env=env, stdout=log, stderr=log, check=True)
        worker = subprocess.Popen(
            serve, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            subprocess.run(submit, cwd=tmp_path, env=env, timeout=150, check=True)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
    answers = [text_of(line["response"]["body"]) for line in read_jsonl(tmp_path / "answers.jsonl")]
    assert answers == [question.answer for question in questions]
