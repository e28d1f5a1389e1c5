"""A worker is killed while vLLM starts: three seconds later none of its processes is alive.

A moment of a start is a process that has appeared and the processor time that it has used since:
on a slow machine the same moment comes later.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from kit.stacks.stage import stage
from kit.stacks.started_as import KINDS, command_of, processes_of

from demo.stack import Worker, eventually

#: How long a start may take to get to its moment.
START_S = 240
#: What is given to processes that end when others have.
GONE_S = 3

WORKER = ""
TRACKER = "resource_tracker"
SPAWNED = "--multiprocessing-fork"
ENGINE = "VLLM::EngineCore"
ENGINE_WORKER = "VLLM::Worker"
FRONT_END = "front_end"


class Moment(NamedTuple):
    """When to kill: a process with `part` in its command line has used so much processor time."""

    part: str
    cpu_s: float
    started_by: str = "celery"
    front_ends: int = 1


#: The first three are those of CI.
MOMENTS = (
    Moment(SPAWNED, 0),
    Moment(ENGINE, 0, "warmq-worker"),
    Moment(FRONT_END, 2, front_ends=2),
    Moment(WORKER, 4),
    Moment(TRACKER, 0, "warmq-worker"),
    Moment(SPAWNED, 1, "warmq-worker", 2),
    Moment(SPAWNED, 4),
    Moment(ENGINE_WORKER, 0, front_ends=2),
    Moment(FRONT_END, 0, "warmq-worker", 2),
    Moment(FRONT_END, 5, "warmq-worker", 2),
)


def told(moment: Moment) -> str:
    return f"{moment.part or 'worker'}-{moment.cpu_s:g}s-{moment.started_by}-{moment.front_ends}"


def reached(worker: Worker, moment: Moment) -> bool:
    """Whether a process of that name has used that much processor time."""
    assert worker.process is not None
    assert worker.process.poll() is None, worker.log_path.read_text()[-3000:]
    for process in processes_of(worker):
        if moment.part not in command_of(process) or (process.pid == worker.pid) == bool(
            moment.part
        ):
            continue
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        if times.user + times.system >= moment.cpu_s:
            return True
    return False


@pytest.mark.timeout(START_S + 60)
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, id=told(moment), marks=[pytest.mark.slow] if n >= 3 else [])
        for n, moment in enumerate(MOMENTS)
    ],
)
def test_nothing_of_a_worker_outlives_it(moment: Moment, tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = on.real_worker(kind=KINDS[moment.started_by], front_ends=moment.front_ends)
        eventually(lambda: reached(worker, moment), START_S, f"{moment}: {worker.log_path}")
        before = {each.pid: command_of(each) for each in processes_of(worker)}
        on.kill(worker)
        eventually(lambda: not processes_of(worker), GONE_S, f"the end of all of {before}")
