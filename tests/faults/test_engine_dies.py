"""The engine's process dies inside a living worker."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from kit.protocol.lessee import chat, client_of
from kit.stacks.stage import Stage, stage
from kit.stacks.started_as import runs

from contract import naming
from contract.redis import keys
from demo.stack import eventually


def deaths(on: Stage) -> dict[bytes, bytes]:
    return client_of(on.store).hgetall(keys.DEATHS)


def test_a_dead_engine_is_rebuilt_in_place_and_the_worker_is_degraded_meanwhile(
    tmp_path: Path,
) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(simulated_process=True, simulated_build_s=1.5)
        on.ready(worker)
        on.submit(120)
        on.running(40)
        on.engine_process(worker).kill()
        eventually(lambda: on.announced(worker)["state"] == "degraded", 5, "degraded")
        # Everything was handed back; what had been in the engine is counted
        assert on.announced(worker)["in_flight"] == 0
        assert 0 < len(deaths(on)) <= 16
        assert set(deaths(on).values()) == {b"1"}
        on.finish()
        assert on.computed().again <= 16
        assert worker.stop() == 0
        assert worker.log_path.read_text().count("rebuilding the engine") == 1
        on.settled()


def test_an_engine_that_dies_with_nothing_in_it_is_rebuilt_before_anything_comes(
    tmp_path: Path,
) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(simulated_process=True)
        on.ready(worker)
        first = on.engine_process(worker)
        first.kill()
        eventually(lambda: on.engine_process(worker).pid != first.pid, 10, "a new engine")
        on.ready(worker)
        on.submit(40)
        on.finish()
        assert on.computed().again == 0
        assert worker.stop() == 0
        on.settled()


def test_requests_that_meet_a_dead_engine_are_not_blamed_for_its_death(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        # The worker looks at its idle engine every 25 s only: the requests come first
        worker = on.worker(simulated_process=True, stall_timeout_s=100, simulated_build_s=1)
        on.ready(worker)
        for n in range(3):
            process = on.engine_process(worker)
            process.kill()
            eventually(lambda dead=process: not runs(dead), 5, "its process has ended")
            on.submit(3, f"b{n}")
            eventually(lambda: on.announced(worker)["state"] == "degraded", 5, "degraded")
            assert deaths(on) == {}
            on.finish(f"b{n}")
        assert worker.stop() == 0
        for n in range(3):
            on.settled(f"b{n}")


def test_an_engine_that_cannot_be_rebuilt_ends_the_worker_and_another_one_goes_on(
    tmp_path: Path,
) -> None:
    with stage(tmp_path) as on:
        programs = tmp_path / "bin"
        programs.mkdir()
        (programs / "cat").symlink_to(shutil.which("cat") or "")
        broken = on.worker(
            env={"PATH": str(programs)}, simulated_process=True, rebuild_tries=2
        )  # fmt: skip
        on.ready(broken)
        on.submit(150)
        on.running(40)
        (programs / "cat").unlink()
        on.engine_process(broken).kill()
        assert broken.process is not None
        assert broken.process.wait(30) == 1
        log = broken.log_path.read_text()
        assert "could not be rebuilt in 2 tries" in log
        assert "No such file or directory: 'cat'" in log
        # It left nothing leased: the next worker need not wait
        assert client_of(on.store).zcard(keys.LEASES) == 0
        other = on.worker(simulated_process=True)
        on.finish()
        assert other.stop() == 0
        on.settled()


def test_an_engine_that_dies_while_its_worker_drains_is_not_rebuilt(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(simulated_process=True)
        on.ready(worker)
        on.submit([chat(f"q{n}", user="simulate:sleep=8") for n in range(30)])
        on.running(16)
        os.kill(worker.pid, signal.SIGTERM)
        eventually(lambda: on.announced(worker).get("state") == "draining", 5, "draining")
        on.engine_process(worker).kill()
        assert worker.process is not None
        assert worker.process.wait(10) == 0
        assert "rebuilding" not in worker.log_path.read_text()
        assert deaths(on) == {}  # whoever stopped the worker may have told its engine, too
        on.submit(10, "b2")
        assert client_of(on.store).zcard(keys.LEASES) == 0
        assert sum(on.store.queue_lengths(naming.DEFAULT_QUEUE).values()) == 40
