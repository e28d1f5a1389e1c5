"""A request makes the drain's event loop stand: the process ends by itself, and is replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from campaign_real import front_ends
from lessee import chat, client_of
from stage import Stage, stage

from contract.redis import keys
from demo.stack import eventually

CULPRIT = 7


def bodies(fate: str) -> list[dict[str, object]]:
    made = [chat(f"question {n}") for n in range(40)]
    made[CULPRIT]["user"] = fate
    return made


@contextmanager
def supervised(on: Stage, **settings: object) -> Iterator[None]:
    """Start a worker, and another whenever one has ended, as systemd does."""
    over = threading.Event()

    def keep() -> None:
        while not over.is_set():
            process = on.worker(stall_timeout_s=5, **settings).process
            assert process is not None
            while process.poll() is None and not over.wait(0.1):
                pass

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def exit_codes(on: Stage) -> list[int]:
    codes = [w.process.poll() for w in on.workers if w.process is not None]
    return [code for code in codes if code is not None]


def stop_all(on: Stage) -> None:
    """Stop what still runs, and see that a worker can be started and stopped after all this."""
    for worker in on.workers:
        worker.stop()
    last = on.worker()
    on.ready(last)
    assert last.stop() == 0


@pytest.mark.timeout(180)
def test_a_request_that_hangs_the_loop_becomes_a_dead_letter(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.submit(bodies("simulate:spin"))
        with supervised(on):
            on.finish(timeout_s=110)
        assert set(exit_codes(on)) == {1}
        (letter,) = on.store.dead_letters()
        assert letter["custom_id"] == f"c{CULPRIT + 1}"
        assert "worker/engine/simulated/engine.py" in on.workers[0].log_path.read_text()
        stop_all(on)
        on.settled(failed={f"c{CULPRIT + 1}": "poison"})


@pytest.mark.timeout(180)
def test_a_call_that_holds_the_interpreters_lock_ends_the_process_and_counts_a_death(
    tmp_path: Path,
) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(stall_timeout_s=5)
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
def test_a_front_end_whose_loop_hangs_ends_and_another_takes_its_place(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        with supervised(on, front_ends=2):
            eventually(lambda: on.workers and front_ends(on.workers[0]), 40, "its front end")
            on.submit(bodies("simulate:spin"))
            on.finish(timeout_s=110)
        assert "the drain's loop has stood for 5 s" in "".join(
            w.log_path.read_text() for w in on.workers
        )
        stop_all(on)
        on.settled(failed={f"c{CULPRIT + 1}": "poison"})


def test_a_worker_whose_loop_hangs_ends_soon_after_sigterm(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(stall_timeout_s=300)
        on.ready(worker)
        on.submit([chat("q", user="simulate:spin")])
        on.running(1)
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.process is not None
        assert worker.process.wait(20) == 1
        assert "running request" in worker.log_path.read_text()


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
