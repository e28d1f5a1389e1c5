"""One batch of lines of three models, through workers that load one model at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.commands.support import chat_line, run_producer, write_lines
from kit.protocol.lessee import client_of, counts
from kit.stacks.celery_side import client_app, send
from kit.stacks.stage import Stage, stage

from contract.batch import Batch
from contract.redis import keys
from contract.redis.waiting import WaitingReads
from demo.stack import Worker, eventually
from producer import Client

MODELS = ("alpha", "beta", "gamma")
QUEUES = [f"warmq.{name}" for name in MODELS]
#: Stays so short that the tests see several swaps.
ENTRY = {"min_stay": "1s", "max_wait": "2s"}


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path) as found:
        yield found


def start(on: Stage, **settings: Any) -> Worker:
    """Start a worker of three models, and wait until it announces them."""
    models = settings.pop("models", MODELS)
    given = json.dumps(dict.fromkeys(models, ENTRY))
    worker = on.worker(models=given, simulated_process=True, **settings)
    eventually(lambda: set(QUEUES[: len(models)]) <= on.store.served_queues(), 40, "it serves them")
    return worker


def mixed(count: int) -> list[dict[str, Any]]:
    return [chat_line(f"r{n}", f"question {n}", model=MODELS[n % 3]) for n in range(count)]


def of(on: Stage, batch_id: str = "b1") -> Batch:
    found = on.store.batch(batch_id)
    assert found is not None
    return found


def assert_answered(printed: str, count: int) -> None:
    """Each line has the answer of its model to its question, in the order of the file."""
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r{n}" for n in range(count)]
    bodies = [line["response"]["body"] for line in lines]
    assert [body["model"] for body in bodies] == [MODELS[n % 3] for n in range(count)]


@pytest.mark.parametrize("workers", [1, 2])
def test_each_line_is_answered_by_its_model(on: Stage, tmp_path: Path, workers: int) -> None:
    started = [start(on) for _ in range(workers)]
    path = write_lines(tmp_path / "in.jsonl", mixed(600))
    url = on.server.url
    done = run_producer("submit", path, "--batch-id", "b1", "--wait", redis_url=url)
    assert done.returncode == 0, done.stderr
    assert counts(of(on)) == {"completed": 600}
    assert_answered(run_producer("results", "b1", redis_url=url).stdout, 600)
    done = run_producer("run", path, tmp_path / "out", "--window", "500", redis_url=url)
    assert done.returncode == 0, done.stderr
    assert_answered((tmp_path / "out").read_text(), 600)
    assert [worker.stop() for worker in started] == [0] * workers


def test_a_worker_of_one_model_each_serves_its_part(on: Stage) -> None:
    start(on, models=("alpha",))
    start(on, models=("alpha", "beta"))
    on.worker(served_model_name="gamma")
    eventually(lambda: set(QUEUES) == on.store.served_queues(), 40, "all are served")
    with Client(on.server.url) as client:
        batch = client.submit(mixed(300))
        assert batch.wait(60).completed == 300
        found = list(batch.results("input"))
        assert [one.body and one.body["model"] for one in found] == [
            MODELS[n % 3] for n in range(300)
        ]


def test_a_cancel_ends_all_and_a_retry_answers_all(on: Stage, tmp_path: Path) -> None:
    worker = start(on)
    path, url = write_lines(tmp_path / "in.jsonl", mixed(600)), on.server.url
    run_producer("submit", path, "--batch-id", "b1", redis_url=url)
    eventually(lambda: of(on).number("completed") > 20, 30, "some are answered")
    assert run_producer("cancel", "b1", redis_url=url).returncode == 0
    assert of(on).status == "cancelled"
    swaps = worker.log_path.read_text().count("swapping from model")
    on.idle(worker, 4)
    # It loads at most the model that it was loading: not one more to drop what was cancelled.
    assert worker.log_path.read_text().count("swapping from model") <= swaps + 1
    waiting = WaitingReads.using(on.store)
    assert waiting.waiting_totals(QUEUES) == dict.fromkeys(QUEUES, 0)
    done = run_producer("retry", "b1", "--include", "cancelled", redis_url=url)
    assert done.returncode == 0
    on.finish("b1", 90)
    assert counts(of(on)) == {"completed": 600}
    assert_answered(run_producer("results", "b1", redis_url=url).stdout, 600)
    assert run_producer("delete", "b1", redis_url=url).returncode == 0
    assert waiting.waiting_totals(QUEUES) == dict.fromkeys(QUEUES, 0)
    left = [key.decode() for key in client_of(on.store).scan_iter("warmq:batch:b1*")]
    assert left == []


def test_a_killed_worker_loses_no_line_of_any_model(on: Stage, tmp_path: Path) -> None:
    first = start(on)
    path = write_lines(tmp_path / "in.jsonl", mixed(600))
    run_producer("submit", path, "--batch-id", "b1", redis_url=on.server.url)
    eventually(lambda: of(on).number("completed") > 20, 30, "some are answered")
    on.kill_group(first)
    second = start(on)
    on.finish("b1", 90)
    assert counts(of(on)) == {"completed": 600}
    assert second.stop() == 0
    assert client_of(on.store).zcard(keys.LEASES) == 0


def test_a_plain_celery_client_is_served_beside_it(on: Stage, tmp_path: Path) -> None:
    start(on)
    on.worker()  # of the default queue, which such a client uses
    eventually(lambda: "warmq" in on.store.served_queues(), 40, "the default queue is served")
    with client_app(on.server.url) as app, Client(on.server.url) as client:
        batch = client.submit(mixed(300))
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        sent = [send(app, body) for _ in range(20)]
        assert all(result.get(timeout=30)["object"] == "chat.completion" for result in sent)
        assert batch.wait(60).completed == 300
