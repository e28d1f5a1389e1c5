"""The engine makes no step any more; or only seems not to."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kit.protocol.lessee import chat, client_of
from kit.stacks.stage import stage

from contract.redis import keys
from demo.stack import eventually


def test_a_hung_engine_is_killed_and_rebuilt(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(simulated_process=True, stall_timeout_s=2)
        on.ready(worker)
        on.submit(120)
        on.running(40)
        hung = on.engine_process(worker)
        hung.suspend()
        eventually(lambda: not hung.is_running() or hung.status() == "zombie", 10, "killed")
        on.finish()
        assert on.computed().again <= 16
        assert "made no step for 2 s" in worker.log_path.read_text()
        assert worker.stop() == 0
        on.settled()


def test_a_slow_engine_an_idle_one_and_one_being_built_are_left_alone(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        # Built for longer than the stall timeout
        worker = on.worker(simulated_process=True, stall_timeout_s=1, simulated_build_s=2.5)
        on.ready(worker)
        engine = on.engine_process(worker)
        # Idle for longer than that
        on.idle(worker, 2.5)
        # Each request takes longer than that
        on.submit([chat(f"q{n}", user="simulate:sleep=3") for n in range(16)])
        on.finish()
        assert engine.is_running()
        assert on.computed().again == 0
        assert "made no step" not in worker.log_path.read_text()
        assert worker.stop() == 0
        on.settled()


def test_a_worker_with_a_hung_engine_can_be_stopped(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(simulated_process=True, stall_timeout_s=60, drain_timeout_s=1)
        on.ready(worker)
        on.submit([chat(f"q{n}", user="simulate:sleep=0.5") for n in range(30)])
        on.running(16)
        on.engine_process(worker).suspend()
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.process is not None
        assert worker.process.wait(10) == 0
        # Handed back, not counted as a death
        assert client_of(on.store).zcard(keys.LEASES) == 0
        assert client_of(on.store).hlen(keys.DEATHS) == 0
        other = on.worker()
        on.finish()
        assert other.stop() == 0
        on.settled()
