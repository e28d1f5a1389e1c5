"""The file by which an orchestrator sees that the drain's loop turns."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from draining import draining, soon

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
