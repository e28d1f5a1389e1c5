"""What a further front end may do to the engine that it shares with its worker."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from demo.stack import MODEL
from worker.engine.vllm.attached import AttachedEngine, _fail_when_one_ends
from worker.engine.vllm_settings import EngineArgs, VllmSettings


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that stands for EngineCore."""
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


def attached(process: subprocess.Popen[bytes]) -> AttachedEngine:
    args = EngineArgs("--kv-cache-memory-bytes 16777216 --max-model-len 256")
    settings = VllmSettings(model=str(MODEL), engine_args=args, kill_grace_s=0.1)
    return AttachedEngine(settings, {"processes": [process.pid], "memory": {}})


def test_a_front_end_that_is_stopped_before_it_has_attached_leaves_the_engine_alone(
    process: subprocess.Popen[bytes],
) -> None:
    engine = attached(process)
    engine.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)


def test_an_engine_that_hangs_is_asked_to_end_before_it_is_killed(
    process: subprocess.Popen[bytes],
) -> None:
    engine = attached(process)
    engine._engine = object()
    engine.kill()
    assert process.wait(20) == -15


def test_the_watch_of_processes_leaves_no_descriptor_open(
    process: subprocess.Popen[bytes],
) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False), shutdown=lambda: None)
    engine: Any = SimpleNamespace(engine_core=core)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - as Linux lists them
    _fail_when_one_ends(engine, [process.pid, gone.pid])
    assert core.resources.engine_dead
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208
