"""A request makes the drain's event loop stand: the process ends by itself, and is replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from kit.campaigns.campaign_real import front_ends
from kit.protocol.lessee import chat, client_of
from kit.stacks.hanging import exit_codes, hung_processes, supervised
from kit.stacks.stage import Stage, stage
from kit.stacks.started_as import KINDS, processes_of, runs, suspend

from contract.redis import keys
from demo.stack import Worker, eventually
from worker.drain.lifecycle import STOP_S

CULPRIT = 7


def bodies(fate: str) -> list[dict[str, object]]:
    made = [chat(f"question {n}") for n in range(40)]
    made[CULPRIT]["user"] = fate
    return made


def stop_all(on: Stage) -> None:
    """Stop what still runs, and see that a worker can be started and stopped after all this."""
    for worker in on.workers:
        worker.stop()
    last = on.worker()
    on.ready(last)
    assert last.stop() == 0


@contextmanager
def only_its_front_end_takes(on: Stage, worker: Worker) -> Iterator[psutil.Process]:
    """Suspend all of a ready worker but one front end, and yield that one."""
    eventually(lambda: on.announced(worker).get("slots") == 16, 40, "all front ends are ready")
    (front_end,) = front_ends(worker)
    suspend(worker.pid)
    try:
        yield front_end
    finally:
        with suppress(ProcessLookupError):  # a test may have killed it
            os.kill(worker.pid, signal.SIGCONT)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "front_ends"),
    [
        ("celery", 1),
        ("warmq-worker", 2),
        pytest.param("celery", 2, marks=pytest.mark.slow),
        pytest.param("warmq-worker", 1, marks=pytest.mark.slow),
    ],
)
def test_a_request_that_hangs_the_loop_becomes_a_dead_letter(
    kind: str, front_ends: int, tmp_path: Path
) -> None:
    with stage(tmp_path) as on:
        on.submit(bodies("simulate:spin"))
        with supervised(on, make=KINDS[kind], front_ends=front_ends, max_deaths=1):
            on.finish(timeout_s=110)
        assert set(exit_codes(on)) <= {1}
        assert len(hung_processes(on)) >= 2
        (letter,) = on.store.dead_letters()
        assert letter["custom_id"] == f"c{CULPRIT + 1}"
        logs = "".join(worker.log_path.read_text() for worker in on.workers)
        assert "worker/engine/simulated/engine.py" in logs
        stop_all(on)
        on.settled(failed={f"c{CULPRIT + 1}": "poison"})


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_holds_the_interpreters_lock_ends_the_process_and_counts_a_death(
    kind: str, tmp_path: Path
) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(make=KINDS[kind], stall_timeout_s=5)
        on.ready(worker)
        (request_id,) = on.submit([chat("q", user="simulate:hold-lock")]) and on.ids()
        assert worker.process is not None
        assert worker.process.wait(120) == -signal.SIGVTALRM
        assert "worker/engine/simulated/engine.py" in worker.log_path.read_text()
        other = on.worker(stall_timeout_s=5)
        deaths = client_of(on.store)
        eventually(lambda: deaths.hget(keys.DEATHS, request_id) == b"1", 40, "counted by SWEEP")
        on.kill_group(other)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("fate", "told"), [("spin", "has been blocked"), ("hold-lock", "most recent")]
)
def test_a_front_end_whose_loop_hangs_ends_alone_and_another_takes_its_place(
    fate: str, told: str, tmp_path: Path
) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(front_ends=2, stall_timeout_s=5)
        with only_its_front_end_takes(on, worker) as hung:
            (request_id,) = on.submit([chat("q", user=f"simulate:{fate}")]) and on.ids()
            eventually(lambda: not runs(hung), 60, "the front end has ended")
        log = worker.log_path.read_text()
        assert told in log
        assert hung_processes(on) == ({hung.pid} if fate == "spin" else set())
        deaths = client_of(on.store)
        eventually(lambda: deaths.hget(keys.DEATHS, request_id) == b"1", 40, "counted")
        eventually(lambda: [p for p in front_ends(worker) if p != hung], 30, "another")
        assert worker.process is not None
        assert worker.process.poll() is None
        assert "front end 2 has died" in worker.log_path.read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_whose_loop_hangs_ends_soon_after_sigterm(kind: str, tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(make=KINDS[kind], stall_timeout_s=300)
        on.ready(worker)
        on.submit([chat("q", user="simulate:spin")])
        on.running(1)
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.process is not None
        assert worker.process.wait(STOP_S + 10) == 1
        assert " by request " in worker.log_path.read_text()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fate", ["spin", "hold-lock"])
def test_a_worker_whose_front_end_hangs_ends_in_time_after_sigterm(
    fate: str, tmp_path: Path
) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(front_ends=2, stall_timeout_s=300, drain_timeout_s=5)
        with only_its_front_end_takes(on, worker) as hung:
            on.submit([chat("q", user=f"simulate:{fate}")])
            on.running(1)
        assert worker.stop(5 + 25) in (0, 1)
        assert not runs(hung)


def test_a_front_end_that_hangs_ends_soon_after_its_worker_was_killed(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(front_ends=2, stall_timeout_s=300)
        with only_its_front_end_takes(on, worker) as hung:
            on.submit([chat("q", user="simulate:spin")])
            on.running(1)
            on.kill(worker)
        eventually(lambda: not processes_of(worker), STOP_S + 5, f"the end of {hung}")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", [pytest.param("gone", marks=pytest.mark.slow), "silent"])
def test_a_loop_that_hangs_while_redis_is_away_ends_as_well(how: str, tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.submit(bodies("simulate:spin"))
        with supervised(on, max_deaths=1):
            eventually(lambda: hangs(on), 40, "the worker hangs")
            redis = on.server.process
            assert redis is not None
            if how == "gone":
                on.server.stop()
            else:
                redis.send_signal(signal.SIGSTOP)
            eventually(lambda: exit_codes(on), 30, "the process has ended without Redis")
            if how == "gone":
                on.server.start()
            else:
                redis.send_signal(signal.SIGCONT)
            on.finish(timeout_s=110)
        assert set(exit_codes(on)) == {1}
        assert "requests return when their leases end" in on.workers[0].log_path.read_text()
        stop_all(on)
        on.settled(failed={f"c{CULPRIT + 1}": "poison"})


def hangs(on: Stage) -> bool:
    """Whether a worker has begun the request that hangs."""
    return on.ids()[CULPRIT] in on.computed().starts


def test_a_worker_that_was_suspended_goes_on(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(stall_timeout_s=5, lease_s=10)
        on.ready(worker)
        paused = threading.Event()
        os.kill(worker.pid, signal.SIGSTOP)
        paused.wait(7)  # longer than the loop may stand
        os.kill(worker.pid, signal.SIGCONT)
        on.submit(20)
        on.finish()
        assert worker.stop() == 0
        on.settled()
