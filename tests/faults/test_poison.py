"""A request that kills its engine each time: it is found, its neighbours complete."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import pytest
from kit.commands.support import run_producer
from kit.protocol.lessee import chat, client_of
from kit.stacks.stage import Stage, stage

from contract import naming
from contract.redis import keys
from demo.stack import eventually


def with_culprit(count: int, at: int, fate: str = "simulate:die") -> list[dict[str, object]]:
    bodies = [chat(f"question {n}") for n in range(count)]
    bodies[at]["user"] = fate
    return bodies


def engine_deaths(on: Stage) -> int:
    return sum(w.log_path.read_text().count("engine died:") for w in on.workers)


@pytest.mark.parametrize(
    "culprit", [127, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 3, 250, 255))]
)
def test_one_poison_among_256_in_flight_on_two_workers_is_found_and_255_complete(
    tmp_path: Path, culprit: int
) -> None:
    with stage(tmp_path) as on:
        bodies = [chat(f"question {n}", user="simulate:sleep=0.4") for n in range(256)]
        bodies[culprit]["user"] = "simulate:die=0.2"  # when all others are in an engine too
        workers = [on.worker(simulated_slots=128, look_ahead=0) for _ in range(2)]
        on.ready(*workers)
        on.submit(bodies)
        on.finish(timeout_s=55)
        assert engine_deaths(on) <= 2 + math.log2(256) + 1
        (letter,) = on.store.dead_letters()
        assert letter["reason"].startswith("poison")
        assert [w.stop() for w in workers] == [0, 0]
        on.settled(failed={f"c{culprit + 1}": "poison"})


def test_a_dead_letter_is_listed_shown_and_retried_by_the_command(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        url = on.server.url
        worker = on.worker(simulated_latency_s=0.05)
        on.submit(with_culprit(20, 5))
        on.finish()
        listed = run_producer("dead", "list", "--json", redis_url=url)
        (letter,) = json.loads(listed.stdout)
        assert letter["custom_id"] == "c6"
        assert "poison" in letter["reason"]
        shown = run_producer("dead", "show", letter["id"], redis_url=url)
        assert "simulate:die" in shown.stdout
        # What killed the engine then does so again: a new letter, and nothing else happens
        before = engine_deaths(on)
        retried = run_producer("dead", "retry", letter["id"], redis_url=url)
        assert retried.returncode == 0, retried.stderr
        on.finish()
        eventually(lambda: [w["id"] for w in on.store.dead_letters()] not in ([], [letter["id"]]))
        assert engine_deaths(on) - before == 4
        assert worker.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_request_that_kills_the_whole_worker_is_found_too(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.submit(with_culprit(12, 5, "simulate:kill-worker"))
        ended = 0
        batch = on.store.batch("b1")
        while batch is not None and not batch.finished:
            worker = on.worker(simulated_slots=4, look_ahead=0, simulated_latency_s=0.1)
            assert worker.process is not None
            eventually(
                lambda w=worker: w.process.poll() is not None or on.store.batch("b1").finished,
                30, "the worker dies, or the batch ends",
            )  # fmt: skip
            ended += worker.process.poll() is not None
            batch = on.store.batch("b1")
        assert ended <= 2 + math.log2(4) + 1
        assert on.workers[-1].stop() == 0
        on.settled(failed={"c6": "poison"})


def test_a_graceful_hand_back_costs_nobody_a_count(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.submit([chat(f"q{n}", user="simulate:sleep=1.5") for n in range(20)])
        for deploys in range(1, 4):
            worker = on.worker(simulated_process=True)
            on.running(16 * deploys)
            os.kill(worker.pid, signal.SIGTERM)
            eventually(lambda w=worker: on.announced(w).get("state") == "draining", 5, "draining")
            os.kill(worker.pid, signal.SIGTERM)
            assert worker.process is not None
            worker.process.wait(10)
            assert client_of(on.store).hlen(keys.DEATHS) == 0
            assert client_of(on.store).zcard(keys.LEASES) == 0
        last = on.worker()
        on.finish()
        assert last.stop() == 0
        assert client_of(on.store).llen(keys.suspects_list(naming.DEFAULT_QUEUE)) == 0
        on.settled()
