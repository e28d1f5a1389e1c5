"""The README's `Use it`, line by line as it stands there: only the port is another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.commands.pages import blocks
from kit.stacks.real_stack import ROOT, read_jsonl, text_of

from demo.stack import eventually, free_port

pytestmark = pytest.mark.timeout(400)
EXPECTED = json.loads((ROOT / "demo" / "expected.json").read_text())


def commands() -> list[str]:
    """Return the section's commands: what starts the worker, and what submits."""
    section = (ROOT / "README.md").read_text().split("## Use it")[1].split("\n## ")[0]
    return [block.text for block in blocks(section) if block.language == "sh"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder that holds what a clone holds after `make setup`; files stay out of ours."""
    folder = tmp_path / "warmq"
    folder.mkdir()
    for entry in ROOT.iterdir():
        if entry.name != ".venv":
            (folder / entry.name).symlink_to(entry)
    (folder / ".venv").symlink_to(sys.prefix)  # the environment under test, whatever its name
    return folder


@pytest.fixture
def port() -> Iterator[int]:
    """Return a free port; the Redis that a block starts there is ended."""
    number = free_port()
    yield number
    redis_cli = Path(sys.prefix) / "bin" / "redis-cli"
    subprocess.run([redis_cli, "-p", str(number), "shutdown", "nosave"], check=True)


def last_command(shell: subprocess.Popen[bytes]) -> int:
    """Return the process that a shell waits for; bash may have become it."""
    children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
    return int(children[0]) if children else shell.pid


def test_the_readmes_use_it_answers_the_demos_questions(clone: Path, port: int) -> None:
    serve, submit = (block.replace("6379", str(port)) for block in commands())
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WARMQ_", "VLLM_"))}
    env["WARMQ_REDIS_URL"] = f"redis://127.0.0.1:{port}/0"  # for the page's port is the default
    log_path = clone.parent / "worker.log"
    with log_path.open("wb") as log:
        worker = subprocess.Popen(
            ["bash", "-ec", serve],
            cwd=clone, env=env, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        done = None
        try:
            # The second terminal knows nothing of the first one's variables.
            done = subprocess.Popen(["bash", "-c", submit], cwd=clone, env=env)
            eventually(lambda: done.poll() is not None or worker.poll() is not None, 300, "its end")
            assert worker.poll() is None, log_path.read_text()
            assert done.returncode == 0  # the last command, `doctor`, finds nothing in the way
            os.kill(last_command(worker), signal.SIGTERM)
            assert worker.wait(60) == 0
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            if done is not None:
                done.kill()
    (error,) = read_jsonl(clone / "errors.jsonl")
    assert "max_tokens" in error["error"]["message"]
    answers = {line["custom_id"]: text_of(line["response"]["body"])
               for line in read_jsonl(clone / "answers.jsonl")}  # fmt: skip
    right = sum(answers.get(custom_id) == text for custom_id, text in EXPECTED.items())
    # In 16 bits, as vLLM runs it unless told otherwise, two tokens may tie.
    assert right >= 0.99 * len(EXPECTED)
    assert log_path.read_text().count("no memory option is given and") == 2  # check's, the worker's


def test_the_korean_readme_has_the_same_commands() -> None:
    def typed(page: str) -> list[str]:
        found = [block for block in blocks((ROOT / page).read_text()) if block.language != "text"]
        return [line.split(" #")[0].rstrip() for block in found for line in block.commands]

    assert typed("README.md") == typed("README.ko.md")
