"""The file by which an orchestrator sees that the drain's loop turns."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.chart.helm_chart import Resource, pods, probe, render, values
from kit.drain.draining import draining, soon
from kit.stacks.celery_side import simulated

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


def container() -> Resource:
    """Return the chart's container of a worker that is hung after ten seconds."""
    spec = {"device": "cpu", "model": "/m", "heartbeatS": 10}
    (pod,) = pods(render(values(workers={"w": spec}, gateway={"enabled": False}))).values()
    (box,) = pod["containers"]
    return dict(box)


def test_what_a_killed_worker_left_is_overwritten_before_the_next_one_builds_its_engine(
    redis_url: str, tmp_path: Path
) -> None:
    beat, log = tmp_path / "heartbeat", tmp_path / "worker.log"
    beat.write_text("ready\n")
    with simulated(redis_url, log, heartbeat_file=str(beat), simulated_build_s=600) as worker:
        eventually(lambda: not says(beat, "ready"), 60, "the file is the new worker's", 0.01)
        assert says(beat, "starting")
        assert not probe("startup", container(), beat)
        worker.kill()


def test_the_first_word_is_written_before_anything_that_may_take_long(file: Path) -> None:
    file.write_text("ready\n")
    heartbeat.write_starting(str(file))
    assert says(file, "starting")
    heartbeat.write_starting(str(file.parent / "missing" / "heartbeat"))  # told by the loop
    heartbeat.write_starting(None)
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def fifo(place: Path) -> None:
    os.mkfifo(place)


def link(place: Path) -> None:
    other = place.with_name("other")
    other.write_text("mine")
    place.symlink_to(other)


@pytest.mark.parametrize("make", [fifo, link, Path.mkdir])
def test_what_is_no_file_keeps_its_place_and_is_refused_by_name(
    redis_url: str, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    place, log = tmp_path / "heartbeat", tmp_path / "worker.log"
    make(place)
    kind = stat.S_IFMT(place.lstat().st_mode)
    with simulated(redis_url, log, heartbeat_file=str(place)) as worker:
        assert worker.process is not None
        assert worker.process.wait(30) == 1
    assert f"WARMQ_HEARTBEAT_FILE: {place} is not a regular file" in log.read_text()
    assert stat.S_IFMT(place.lstat().st_mode) == kind


async def test_a_device_that_comes_later_keeps_its_place(
    file: Path, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with draining(redis_url, heartbeat_file=str(file)):
        await soon(lambda: says(file, "ready"))
        os.mkfifo(other := file.with_name("other"))
        other.replace(file)
        await soon(lambda: "is not a regular file" in caplog.text)
        await soon(file.is_fifo)


def test_the_chart_s_probes_follow_a_worker_that_starts_hangs_and_goes_on(
    redis_url: str, tmp_path: Path
) -> None:
    box, beat = container(), tmp_path / "heartbeat"
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
