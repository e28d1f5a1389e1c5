"""The programs of docs/python.md as they stand there, in a row: only the port is another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.commands.support import producer_env
from kit.stacks.celery_side import simulated

from demo.stack import ROOT


@pytest.mark.timeout(120)
def test_the_programs_of_the_python_page_print_answers(redis_url: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    program = "\n".join(programs).replace("redis://127.0.0.1:6379/0", redis_url)
    env = producer_env(redis_url)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    with simulated(redis_url, tmp_path / "worker.log"):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=env,
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert [line.rpartition("?")[0] for line in printed[1:6]] == [
        f"What is {n} plus 2" for n in range(5)
    ]
    assert printed[6] == "chat.completion SUCCESS"
    assert printed[7].startswith("RequestRejected invalid_request ")
    assert printed[8:] == ["5 answers", "5 lines"]
