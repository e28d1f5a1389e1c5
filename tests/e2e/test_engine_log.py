"""A worker is quiet: vLLM's log is in a file, which the worker's log and its errors name."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from demo.stack import RedisServer, eventually, tiny_model_worker

#: A line of vLLM's own log that is neither a warning nor an error.
OF_VLLM = re.compile(r"^(\S+ )*INFO \S+ \S+ \[\w+\.py:\d+\]", re.MULTILINE)


@pytest.mark.timeout(600)
def test_vllms_log_is_in_a_file_that_the_start_and_each_error_name(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    log, file = tmp_path / "worker.log", tmp_path / "worker.engine.log"
    with tiny_model_worker(redis_server.url, log) as worker:
        eventually(lambda: " ready in " in log.read_text(), 250, "it is ready")
        start = log.read_text()
        (core,) = psutil.Process(worker.pid).children()[-1:]
        core.kill()
        eventually(lambda: "engine died" in log.read_text(), 60, "it says so")
        worker.kill()
    named = f"vLLM's log is {file}"
    assert named in start.partition("Starting the engine")[0]
    assert not OF_VLLM.search(start) and len(start.splitlines()) < 30
    assert "WARNING" in start  # vLLM's warnings are in both
    assert len(OF_VLLM.findall(file.read_text())) > 10
    assert "Initializing a V1 LLM engine" in file.read_text()
    died = next(line for line in log.read_text().splitlines() if "engine died" in line)
    assert log.read_text().partition(died)[2].splitlines() or named in died
    assert named in log.read_text().partition("engine died")[2]
