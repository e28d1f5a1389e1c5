"""Two models that are loaded at the same time, and a third one that takes turns with them."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
from kit.protocol.lessee import chat, client_of
from kit.stacks.celery_side import client_app, in_flight
from kit.stacks.stage import Stage, stage

from contract.redis import keys
from demo.stack import Worker, eventually

MODELS = ("chat", "embed", "other")
ENTRY = {"min_stay": "1s", "max_wait": "3s"}


def start(on: Stage, **entries: dict[str, str]) -> Worker:
    found = {"chat": ENTRY, "embed": ENTRY | {"with": "chat"}} | entries
    return on.worker(models=json.dumps(found), simulated_process=True)


def submit(on: Stage, model: str, count: int) -> str:
    bodies = [chat(f"question {n} of {model}") | {"model": model} for n in range(count)]
    on.submit(bodies, f"b-{model}", queue=f"warmq.{model}")
    return f"b-{model}"


def settle(on: Stage, *batches: str) -> None:
    for batch in batches:
        on.finish(batch, 120)
    for batch in batches:
        on.settled(batch)


def served(on: Stage) -> set[str]:
    return {w["served"] for w in on.store.announcements() if w["state"] == "ready"}


def engines(worker: Worker) -> list[psutil.Process]:
    return [p for p in psutil.Process(worker.pid).children() if p.name() == "cat"]


def test_both_models_are_served_at_the_same_time_without_a_swap(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on)
        eventually(lambda: served(on) == {"chat", "embed"}, 40, "both are ready")
        batches = [submit(on, "chat", 400), submit(on, "embed", 400)]

        def both() -> bool:
            return sum(bool(w["in_flight"]) for w in on.store.announcements()) == 2

        eventually(both, 40, "both have requests in flight")
        with client_app(on.server.url) as app:
            listed = in_flight(app)
        ids = [set(on.ids(batch)) for batch in batches]
        assert all(listed & each for each in ids)
        settle(on, *batches)
        assert "swapping from model" not in worker.log_path.read_text()
        kept = engines(worker)
        assert len(kept) == 2
        assert worker.stop() == 0
        eventually(lambda: not any(p.is_running() for p in kept), 20, "the engines' ends")
        assert on.store.served_queues() == set()


def test_they_are_loaded_and_unloaded_together(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on, other=ENTRY)
        batches = [submit(on, model, 250) for model in MODELS]
        settle(on, *batches)
        log = worker.log_path.read_text()
        assert "from model chat to other" in log or "from model other to chat" in log
        assert "to embed" not in log and "from model embed" not in log
        assert worker.stop() == 0
        assert not client_of(on.store).hlen(keys.SWAP_CLAIMS)


def test_nothing_is_lost_when_the_worker_is_killed(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on, other=ENTRY)
        batches = [submit(on, model, 200) for model in MODELS]
        for count in (60, 200):
            on.running(count)
            on.kill(worker)
            worker = start(on, other=ENTRY)
        settle(on, *batches)
        assert worker.stop() == 0


def test_a_model_that_cannot_be_loaded_with_another_one_takes_turns(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on, embed=ENTRY | {"with": "chat", "path": "simulate:fail"})
        settle(on, submit(on, "chat", 200))
        log = worker.log_path.read_text()
        assert "model embed is no longer loaded together with chat" in log
        assert worker.stop() == 0
