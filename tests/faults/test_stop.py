"""Stopping with work in flight: exit codes, and how soon another worker goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from kit.protocol import script_keys
from kit.protocol.lessee import QUEUE, celery_message, chat, client_of
from kit.stacks.stage import Stage, stage
from kit.stacks.started_as import suspend

from contract.redis import keys
from demo.stack import Worker, eventually
from worker.drain.lifecycle import STOP_S


def loaded(on: Stage, seconds: float, **settings: object) -> Worker:
    """Return a worker with its 16 slots full of requests that take so long."""
    worker = on.worker(**settings)
    on.ready(worker)
    load(on, seconds)
    return worker


def load(on: Stage, seconds: float) -> None:
    """Queue requests that take so long, until 16 of them run."""
    on.submit([chat(f"q{n}", user=f"simulate:sleep={seconds}") for n in range(30)])
    on.running(16)


def send(on: Stage, worker: Worker, signals: Sequence[int]) -> int:
    """Send signals one after the other and return the exit code."""
    for number, sig in enumerate(signals):
        if number:
            eventually(lambda: on.announced(worker).get("state") == "draining", 5, "draining")
        os.kill(worker.pid, sig)
    assert worker.process is not None
    return worker.process.wait(15)


# Exit code 1 of SIGINT is Celery's own rule.
@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGTERM], 0),
        ([signal.SIGINT], 1),
        ([signal.SIGTERM, signal.SIGTERM], 0),
        ([signal.SIGQUIT], 0),
    ],
    ids=["SIGTERM", "SIGINT", "SIGTERM_twice", "SIGQUIT"],
)
def test_another_worker_has_the_rest_within_a_second_of_the_exit(
    tmp_path: Path, signals: Sequence[int], code: int
) -> None:
    with stage(tmp_path) as on:
        # The other one has room, but a lease of a minute: nothing comes back by sweeping
        second = on.worker(lease_s=60, simulated_slots=32)
        first = on.worker(lease_s=60)
        on.ready(first, second)
        suspend(second.pid)  # it must not take the work that is for the first
        load(on, 3)
        os.kill(second.pid, signal.SIGCONT)
        assert send(on, first, signals) == code
        left = time.monotonic()
        assert client_of(on.store).hlen(script_keys.worker_key(on.id_of(first))) == 0
        rest = {rid for rid in on.ids() if on.store.results([rid])[0] is None}
        eventually(lambda: rest <= on.computed().began_on(second.pid), 5, "the rest runs")
        assert time.monotonic() - left <= 1
        on.finish()
        hurried = len(signals) > 1 or signals[0] == signal.SIGQUIT
        assert on.computed().again == (16 if hurried else 0)
        assert client_of(on.store).hlen(keys.DEATHS) == 0
        assert second.stop() == 0
        on.settled()


def test_what_does_not_finish_in_the_drain_timeout_is_handed_back(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        first = loaded(on, 6, lease_s=60, drain_timeout_s=1)
        began = time.monotonic()
        assert send(on, first, [signal.SIGTERM]) == 0
        assert time.monotonic() - began <= 1 + 3
        second = on.worker(lease_s=60, simulated_slots=32)
        on.running(16 + 30)
        assert client_of(on.store).hlen(keys.DEATHS) == 0
        on.finish()
        assert second.stop() == 0
        on.settled()


def test_stopping_while_the_engine_is_built_or_rebuilt_takes_nothing_along(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.submit(60)
        starting = on.worker(simulated_process=True, simulated_build_s=3)
        eventually(lambda: on.announced(starting), 20, "it sweeps")
        assert send(on, starting, [signal.SIGTERM]) == 0
        assert on.computed().starts.total() == 0

        degraded = on.worker(simulated_process=True, simulated_build_s=2)
        on.running(16)
        on.engine_process(degraded).kill()
        eventually(lambda: on.announced(degraded)["state"] == "degraded", 5, "degraded")
        assert send(on, degraded, [signal.SIGTERM]) == 0
        assert client_of(on.store).zcard(keys.LEASES) == 0

        last = on.worker()
        on.finish()
        assert last.stop() == 0
        on.settled()


def test_a_worker_that_waits_for_its_own_work_before_it_runs_suspects_ends_in_time(
    tmp_path: Path,
) -> None:
    lock = keys.suspects_list(QUEUE) + ":lock"
    with stage(tmp_path) as on:
        worker = on.worker(lease_s=60, drain_timeout_s=1)
        on.ready(worker)
        on.submit([chat(f"q{n}", user="simulate:sleep=600") for n in range(16)])
        on.running(16)
        client_of(on.store).lpush(keys.suspects_list(QUEUE), celery_message("suspect"))
        eventually(lambda: client_of(on.store).exists(lock), 10, "it has seen the suspect")
        began = time.monotonic()
        assert send(on, worker, [signal.SIGTERM]) == 0
        assert time.monotonic() - began <= 1 + 3
        assert client_of(on.store).zcard(keys.LEASES) == 0
        assert client_of(on.store).hlen(keys.DEATHS) == 0
        assert not client_of(on.store).exists(lock)


def test_a_redis_that_accepts_and_never_answers_does_not_keep_a_busy_worker(
    tmp_path: Path,
) -> None:
    with stage(tmp_path) as on:
        worker = loaded(on, 600, lease_s=60, drain_timeout_s=1)
        assert on.server.process is not None
        on.server.process.send_signal(signal.SIGSTOP)
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.process is not None
        assert worker.process.wait(1 + STOP_S + 5) == 1
        assert "Redis is unreachable while stopping" in worker.log_path.read_text()
