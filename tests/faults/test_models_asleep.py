"""Several models whose engines sleep between their stays, and what is killed meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from kit.protocol.lessee import chat
from kit.stacks.stage import Stage, stage

from demo.stack import Worker, eventually

MODELS = ("alpha", "beta", "gamma")
#: Stays so short that the tests see many swaps.
ENTRY = {"min_stay": "1s", "max_wait": "2s"}


def start(on: Stage, sleep: str = "well", **settings: object) -> Worker:
    models = json.dumps({name: ENTRY for name in MODELS})
    return on.worker(models=models, simulated_process=True, simulated_sleep=sleep, **settings)


def submit(on: Stage, count: int) -> list[str]:
    batches = [f"b-{model}" for model in MODELS]
    for model, batch in zip(MODELS, batches, strict=True):
        bodies = [chat(f"question {n} of {model}") | {"model": model} for n in range(count)]
        on.submit(bodies, batch, queue=f"warmq.{model}")
    return batches


def settle(on: Stage, batches: list[str]) -> None:
    for batch in batches:
        on.finish(batch, 120)
    for batch in batches:
        on.settled(batch)


def engines(worker: Worker) -> list[psutil.Process]:
    """Return the processes that stand for EngineCore, of all models."""
    return [p for p in psutil.Process(worker.pid).children() if p.name() == "cat"]


def gone(processes: list[psutil.Process]) -> None:
    eventually(lambda: not any(p.is_running() for p in processes), 20, "the engines' ends")


def test_engines_are_started_once_and_end_with_the_worker(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on)
        settle(on, submit(on, 200))
        log = worker.log_path.read_text()
        assert log.count("swapping from model") >= 3
        kept = engines(worker)
        assert len(kept) == len(MODELS)
        assert worker.stop() == 0
        gone(kept)
        assert "asleep between its stays" in log and "cannot sleep" not in log


@pytest.mark.parametrize("sleep", ["wrong", "leaks", "fails"])
def test_engines_that_sleep_wrongly_are_started_for_each_stay(tmp_path: Path, sleep: str) -> None:
    with stage(tmp_path) as on:
        worker = start(on, sleep)
        settle(on, submit(on, 300))
        failed = eventually(
            lambda: [one["sleep_failed"] for one in on.store.announcements()
                     if one.get("sleep_failed")], 30, "the failure is announced",
        )  # fmt: skip
        assert set(failed[0]) <= set(MODELS)
        log = worker.log_path.read_text()
        assert 1 <= log.count("cannot sleep: ") <= len(MODELS)
        assert len(engines(worker)) <= len(MODELS) - log.count("cannot sleep: ") + 1
        assert worker.stop() == 0


def test_nothing_is_lost_when_engines_are_killed_asleep(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on)
        batches = submit(on, 250)
        for count in (2, 4):
            eventually(lambda count=count: worker.log_path.read_text().count(" sleeps: ") >= count,
                       60, "a sleep")  # fmt: skip
            for process in engines(worker):
                process.kill()
        settle(on, batches)
        assert worker.stop() == 0


def test_no_engine_outlives_a_killed_worker(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on)
        batches = submit(on, 200)
        eventually(lambda: len(engines(worker)) >= 2, 60, "an engine that sleeps")
        kept = engines(worker)
        on.kill(worker)
        gone(kept)
        again = start(on)
        settle(on, batches)
        assert again.stop() == 0


def test_a_stop_does_not_wait_for_an_engine_that_falls_asleep(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on, "hangs")
        batches = submit(on, 100)
        eventually(lambda: "swapping from model" in worker.log_path.read_text(), 60, "a swap")
        assert worker.stop() == 0
        on.submit([chat("now")], "last", queue="warmq.alpha")
        again = start(on)
        settle(on, [*batches, "last"])
        assert again.stop() == 0
