"""The chart's probes, run on heartbeats of each state and age."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from kit.chart.helm_chart import EXAMPLES, Resource, pods, probe, render, values

from worker.drain.lifecycle import State


def container(**spec: Any) -> Resource:
    """Return a worker's container."""
    spec = {"device": "cpu", "model": "/models/m"} | spec
    given = values(workers={"w": spec}, gateway={"enabled": False})
    found: Resource = pods(render(given))["prod-warmq-worker-w"]["containers"][0]
    return found


@pytest.mark.parametrize("state", State)
def test_the_probes_read_each_state_of_a_worker(state: State, tmp_path: Path) -> None:
    box, file = container(), tmp_path / "heartbeat"
    file.write_text(f"{state.value}\n")
    assert probe("liveness", box, file)
    assert probe("readiness", box, file) == (state is State.READY)
    started = state in (State.READY, State.DEGRADED, State.DRAINING)
    assert probe("startup", box, file) == started


def test_a_worker_whose_heartbeat_is_old_or_missing_is_not_alive(tmp_path: Path) -> None:
    box, file = container(heartbeatS=30), tmp_path / "heartbeat"
    assert not probe("liveness", box, file)
    file.write_text("ready\n")
    os.utime(file, (time.time() - 25, time.time() - 25))
    assert probe("liveness", box, file)
    os.utime(file, (time.time() - 31, time.time() - 31))
    assert not probe("liveness", box, file)


def test_what_a_dead_process_left_does_not_pass_for_the_start_of_the_next(tmp_path: Path) -> None:
    """The file outlives its container: it is as old as the new one, if nothing writes it anew."""
    box, file = container(heartbeatS=600), tmp_path / "heartbeat"
    startup = box["startupProbe"]
    for attempt in range(3):
        age = startup["initialDelaySeconds"] + attempt * startup["periodSeconds"]
        file.write_text("ready\n")
        os.utime(file, (time.time() - age, time.time() - age))
        assert not probe("startup", box, file)


def test_a_worker_whose_heartbeat_is_old_is_not_ready(tmp_path: Path) -> None:
    box, file = container(heartbeatS=30), tmp_path / "heartbeat"
    file.write_text("ready\n")
    os.utime(file, (time.time() - 25, time.time() - 25))
    assert probe("readiness", box, file)
    os.utime(file, (time.time() - 31, time.time() - 31))
    assert not probe("readiness", box, file)


def test_probes_have_time_beside_a_worker_that_needs_the_whole_processor() -> None:
    for name, found in [each for file in EXAMPLES for each in pods(render(values(file))).items()]:
        for kind in ("startup", "liveness", "readiness"):
            assert found["containers"][0][f"{kind}Probe"]["timeoutSeconds"] >= 5, (name, kind)


def test_a_start_may_take_as_long_as_it_is_given() -> None:
    for seconds in (60, 3600, 7200, 65):
        startup = container(startupS=seconds)["startupProbe"]
        # The last attempt: the container is given up if it fails too.
        last_s = startup["initialDelaySeconds"]
        last_s += startup["periodSeconds"] * (startup["failureThreshold"] - 1)
        assert seconds <= last_s < seconds + 10
