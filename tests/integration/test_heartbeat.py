"""The file by which an orchestrator sees that the drain's loop turns."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest
from celery_side import simulated
from draining import draining, soon
from helm_chart import probe, render, values

from demo.stack import eventually
from worker.drain import heartbeat
from worker.engine import Capacity
from worker.engine.simulated.engine import SimulatedEngine

NO_REDIS = "redis://127.0.0.1:1/0"


class SlowEngine(SimulatedEngine):
    """Starts when it is told to."""

    may_start: asyncio.Event

    async def start(self) -> Capacity:
        await type(self).may_start.wait()
        return await super().start()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.01)
    return tmp_path / "heartbeat"


def says(file: Path, state: str) -> bool:
    return file.exists() and file.read_text() == f"{state}\n"


def written_at(file: Path) -> int:
    return file.stat().st_mtime_ns


async def beats(file: Path, times: int = 3) -> None:
    """Wait until the file was written so many times more."""
    for _ in range(times):
        before = written_at(file)
        await soon(lambda b=before: written_at(file) != b)


async def test_the_file_is_written_while_the_engine_starts_and_says_when_it_has(
    file: Path, redis_url: str
) -> None:
    SlowEngine.may_start = asyncio.Event()
    async with draining(redis_url, SlowEngine, heartbeat_file=str(file)):
        await soon(lambda: says(file, "starting"))
        await beats(file)
        SlowEngine.may_start.set()
        await soon(lambda: says(file, "ready"))
        await beats(file)


async def test_the_file_is_written_while_redis_does_not_answer(file: Path) -> None:
    async with draining(NO_REDIS, heartbeat_file=str(file)) as running:
        await soon(lambda: says(file, "ready"))
        await beats(file, 20)
        running.drain.hurry()
        await soon(lambda: running.task is not None and running.task.done())


async def test_a_file_that_cannot_be_written_is_told_once_and_the_worker_goes_on(
    file: Path, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = file.parent / "missing" / "heartbeat"
    with caplog.at_level(logging.WARNING):
        async with draining(redis_url, heartbeat_file=str(file)):
            await soon(lambda: "WARMQ_HEARTBEAT_FILE" in caplog.text)
            file.parent.mkdir()
            await soon(lambda: says(file, "ready"))
    assert caplog.text.count("WARMQ_HEARTBEAT_FILE") == 1


async def test_without_the_setting_no_file_is_written(file: Path, redis_url: str) -> None:
    async with draining(redis_url) as running:
        await soon(lambda: running.state.value == "ready")
    assert list(file.parent.iterdir()) == []


def test_the_chart_s_probes_follow_a_worker_that_starts_hangs_and_goes_on(
    redis_url: str, tmp_path: Path
) -> None:
    written = values(
        workers={"w": {"device": "cpu", "model": "/m", "heartbeatS": 10}},
        gateway={"enabled": False},
    )
    (pod,) = (each["spec"]["template"] for each in render(written) if each["kind"] == "Deployment")
    (box,), beat = pod["spec"]["containers"], tmp_path / "heartbeat"
    assert not probe("startup", box, beat)
    with simulated(redis_url, tmp_path / "worker.log", heartbeat_file=str(beat)) as worker:
        for name in ("startup", "readiness", "liveness"):
            eventually(lambda name=name: probe(name, box, beat), 60, f"{name} is well", 0.2)
        assert worker.process is not None
        os.kill(worker.process.pid, signal.SIGSTOP)
        try:
            eventually(lambda: not probe("liveness", box, beat), 30, "a hung worker shows", 0.2)
        finally:
            os.kill(worker.process.pid, signal.SIGCONT)
        eventually(lambda: probe("liveness", box, beat), 30, "it goes on", 0.2)
