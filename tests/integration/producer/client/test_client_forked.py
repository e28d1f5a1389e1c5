"""A client that is used in a process and in those that were forked of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kit.commands.support import producer_env
from kit.stacks.celery_side import simulated

PROGRAM = """
import os

from producer import Client

client = Client()
parent = client.submit([{"prompt": f"question {n}"} for n in range(300)])
results = iter(parent.results())
first = next(results)
children = []
for _ in range(3):
    child = os.fork()
    if not child:
        own = client.submit([{"prompt": f"question {n}"} for n in range(200)])
        lines = sorted(result.line for result in own.results())
        theirs = sorted(result.line for result in parent.results())
        right = lines == [*range(1, 201)] and theirs == [*range(1, 301)]
        os._exit(0 if right else 1)
    children.append(child)
lines = sorted([first.line, *(result.line for result in results)])
print(lines == [*range(1, 301)], [os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.timeout(120)
def test_each_process_gets_its_own_answers_and_all_of_them(redis_url: str, tmp_path: Path) -> None:
    with simulated(redis_url, tmp_path / "worker.log"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=producer_env(redis_url), cwd=tmp_path,
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
    assert done.stdout == "True [0, 0, 0]\n", done.stderr
