"""A file whose lines name several models: each line goes to its model's queue, as one batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.doctor_findings import announce
from kit.commands.submitting import ONCE, submit
from kit.commands.support import (
    TTL_MS,
    as_json,
    chat_line,
    finish,
    queued,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.protocol.lessee import Lessee, client_of, counts

from contract.errors import BatchConflict, RequestFailed
from contract.message import read_delivery
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.waiting import WaitingReads
from contract.results import success_meta
from contract.settings import Settings
from contract.version import PROTOCOL
from producer import Client
from producer.submit.routes import routed
from worker.drain.endings import Ending, done_arguments

MODELS = ("alpha", "beta", "gamma")
QUEUES = {name: f"warmq.{name}" for name in MODELS}


@pytest.fixture(autouse=True)
def _served(store: BatchStore) -> None:
    serve(store)


def serve(store: BatchStore, loaded: str = "alpha", **more: Any) -> None:
    """Announce a worker of three models."""
    announce(store, queue=QUEUES[loaded], models=QUEUES, **more)


def mixed_lines(count: int, models: tuple[str, ...] = MODELS) -> list[dict[str, Any]]:
    return [
        chat_line(f"r{n}", f"question {n}", model=models[n % len(models)], max_tokens=9)
        for n in range(count)
    ]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", mixed_lines(1200))


def names(store: BatchStore, queue: str) -> list[str]:
    """Return the custom_ids that wait in a queue, next one first."""
    return [message["headers"]["warmq"]["custom_id"] for message in queued(store, queue)]


def assert_routed(store: BatchStore, count: int) -> None:
    for at, model in enumerate(MODELS):
        assert names(store, QUEUES[model]) == [f"r{n}" for n in range(at, count, len(MODELS))]
        keyed = {
            m["properties"]["delivery_info"]["routing_key"] for m in queued(store, QUEUES[model])
        }
        assert keyed == {QUEUES[model]}
    assert queued(store) == []


def answered(redis_url: str, *args: str) -> list[str]:
    done = run_producer("results", "b1", *args, redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    return [orjson.loads(line)["custom_id"] for line in done.stdout.splitlines()]


def run_models(store: BatchStore, *models: str) -> int:
    return sum(run_all(store, QUEUES[model]) for model in models or MODELS)


def test_each_line_goes_to_its_models_queue_and_results_keep_the_files_order(
    redis_url: str, store: BatchStore, mixed: Path
) -> None:
    done = run_producer("submit", mixed, "--batch-id", "b1", redis_url=redis_url)
    assert (done.returncode, "no worker serves" in done.stderr) == (0, False), done.stderr
    assert_routed(store, 1200)
    batch = state(store, "b1")
    assert (batch.number("total"), sorted(batch.queues)) == (1200, sorted(QUEUES.values()))
    assert run_models(store, "beta") == 400
    shown = as_json(run_producer("status", "b1", "--json", redis_url=redis_url))
    assert shown["request_counts"]["completed"] == 400
    assert sorted(shown["queues"]) == sorted(QUEUES.values())
    assert {stall["code"] for stall in shown["stalls"]} == {"model_not_loaded"}
    assert run_models(store) == 800
    assert state(store, "b1").status == "completed"
    assert answered(redis_url, "-o", "-") == [f"r{n}" for n in range(1200)]


def test_a_repeated_or_resumed_submit_queues_each_line_once_whoever_serves_then(
    redis_url: str, store: BatchStore, mixed: Path
) -> None:
    with Client(redis_url) as client:

        def broken() -> Iterator[dict[str, Any]]:
            yield from mixed_lines(1200)[:700]
            raise RuntimeError("the program ends here")

        with pytest.raises(RuntimeError):
            client.submit(broken(), batch_id="b1")
        client_of(store).delete(keys.WORKERS)  # the routes are those of the batch
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            client.submit(mixed_lines(1200), batch_id="b1")
        assert sorted(str(one.message).split(";")[0] for one in told) == [
            f"b1: no worker serves queue {queue}" for queue in sorted(QUEUES.values())
        ]
        serve(store)
        client.submit(mixed_lines(1200), batch_id="b1")
    assert_routed(store, 1200)
    with pytest.raises(BatchConflict), Client(redis_url) as client:
        client.submit(mixed_lines(1199), batch_id="b1")


@pytest.mark.parametrize("order", ["prefix", "auto"])
def test_a_planned_order_holds_in_each_queue(store: BatchStore, tmp_path: Path, order: Any) -> None:
    prefix = "the same long beginning of a prompt, which many lines share; " * 20
    lines = [
        chat_line(f"r{n}", f"{prefix}{n % 7} then {n}", model=MODELS[n % 3]) for n in range(1000)
    ]
    path = write_lines(tmp_path / "in", lines)
    submission = routed(replace(ONCE, order=order), store, "warmq")
    first = submit(store, path, submission)
    client_of(store).delete(keys.WORKERS)
    again = submit(store, path, replace(submission, routes={}))
    assert (first.queued, again.queued) == (1000, 0)
    for at, model in enumerate(MODELS):
        assert sorted(names(store, QUEUES[model])) == sorted(f"r{n}" for n in range(at, 1000, 3))
    assert run_models(store) == 1000
    assert state(store, "b1").status == "completed"


def test_a_line_of_an_unknown_model_is_an_error_result_that_names_the_models(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    lines = [*mixed_lines(4), chat_line("bad", model="gama"), chat_line("none")]
    path = write_lines(tmp_path / "in", lines)
    done = run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)
    text = "line 5, field model: no worker serves 'gama'; workers serve: alpha, beta, gamma"
    assert text in done.stderr
    assert "1 bad line" in done.stderr
    # A line without a model goes where it goes as ever, and that is told.
    assert names(store, "warmq") == ["none"]
    assert "no worker serves queue warmq; workers serve: --model alpha" in done.stderr
    planned = run_producer("plan", path, redis_url=redis_url)
    assert planned.returncode == 1 and text in planned.stdout + planned.stderr
    run_models(store)
    batch = state(store, "b1")
    assert counts(batch) == {"completed": 4, "failed": 1}
    codes = as_json(run_producer("status", "b1", "--json", redis_url=redis_url))["failures"]
    assert codes[0]["code"] == "model_not_found"


@pytest.mark.parametrize("given", [("--model", "beta"), ("--set", "model=gamma")])
def test_a_model_for_all_lines_chooses_as_ever(
    redis_url: str, store: BatchStore, mixed: Path, given: tuple[str, str]
) -> None:
    run_producer("submit", mixed, *given, redis_url=redis_url)
    queue = "warmq.beta" if given[0] == "--model" else "warmq"
    assert len(names(store, queue)) == 1200


@pytest.mark.parametrize("workers", ["none", "one"])
def test_without_workers_of_named_models_all_lines_go_to_the_default_queue(
    redis_url: str, store: BatchStore, mixed: Path, workers: str
) -> None:
    client_of(store).delete(keys.WORKERS)
    if workers == "one":
        announce(store)
    run_producer("submit", mixed, "--batch-id", "b1", redis_url=redis_url)
    assert len(names(store, "warmq")) == 1200
    assert {"routes", "queues"}.isdisjoint(state(store, "b1").fields)


def test_a_cancel_ends_the_lines_of_all_queues_and_a_retry_runs_them_again(
    redis_url: str, store: BatchStore, mixed: Path
) -> None:
    run_producer("submit", mixed, "--batch-id", "b1", redis_url=redis_url)
    run_models(store, "alpha")
    lessee = Lessee(client_of(store), queue=QUEUES["beta"])
    finish(lessee, lessee.pop(30), RequestFailed("no", code="engine_error"))
    done = run_producer("cancel", "b1", redis_url=redis_url)
    assert "770 requests cancelled" in done.stderr
    assert state(store, "b1").status == "cancelled"
    assert run_models(store) == 0  # POP drops what was cancelled
    assert WaitingReads.using(store).waiting_totals(QUEUES.values()) == dict.fromkeys(
        QUEUES.values(), 0
    )
    done = run_producer("retry", "b1", "--include", "cancelled", redis_url=redis_url)
    assert "800 requests queued again" in done.stderr
    assert [len(names(store, queue)) for queue in QUEUES.values()] == [0, 400, 400]
    assert run_models(store) == 800
    assert counts(state(store, "b1")) == {"completed": 1200}
    assert answered(redis_url) == [f"r{n}" for n in range(1200)]


def test_cut_answers_run_again_in_their_models_queues(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in", mixed_lines(6))
    run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)
    for queue in QUEUES.values():
        lessee = Lessee(client_of(store), queue=queue)
        its = [read_delivery(one.id, one.message) for one in lessee.pop(9)]
        body = b'{"choices":[{"finish_reason":"length"}]}'
        ends = [Ending(it, "completed", success_meta(it, body, {}), cut=True) for it in its]
        lessee.run("done", lessee.worker, TTL_MS, *done_arguments(ends))
    done = run_producer("retry", "b1", "--cut", "--set", "max_tokens=99", redis_url=redis_url)
    assert "6 requests queued again" in done.stderr, done.stderr
    assert_routed(store, 6)
    assert run_models(store) == 6
    assert counts(state(store, "b1")) == {"completed": 6}


def test_a_delete_removes_what_waits_in_all_queues(
    redis_url: str, store: BatchStore, mixed: Path
) -> None:
    run_producer("submit", mixed, "--batch-id", "b1", redis_url=redis_url)
    done = run_producer("delete", "b1", "--force", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    left = {k.decode() for k in client_of(store).scan_iter("warmq*")}
    assert not [key for key in left if "b1" in key]
    assert WaitingReads.using(store).waiting_totals(QUEUES.values()) == dict.fromkeys(
        QUEUES.values(), 0
    )


def test_suspects_of_a_queue_return_to_that_queue(store: BatchStore, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", mixed_lines(6))
    submit(store, path, routed(ONCE, store, "warmq"))
    lessee = Lessee(client_of(store), queue=QUEUES["beta"])
    leases = lessee.pop(2)
    lessee.release(*leases, died=leases, max_deaths=1)
    assert client_of(store).llen(keys.suspects_list(QUEUES["beta"])) == 2
    (first,) = lessee.pop(1, lists=[keys.suspects_list(QUEUES["beta"])])
    lessee.release(first)
    store.cancel(state(store, "b1"))
    assert lessee.pop(5) == lessee.pop(5, lists=[keys.suspects_list(QUEUES["beta"])]) == []
    assert store.retry(state(store, "b1"), ["cancelled"]) == 6
    assert sorted(names(store, QUEUES["beta"])) == ["r1", "r4"]
    assert queued(store) == []


def test_a_full_queue_of_one_model_makes_the_submit_wait(store: BatchStore, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", mixed_lines(1500))
    settings = Settings(_env_file=None, high_water_requests=300)
    waits = list[str]()

    def report(summary: Any) -> None:
        if summary.waiting:
            waits.append(summary.waiting)
            run_models(store)

    summary = submit(store, path, routed(ONCE, store, "warmq"), report, settings)
    assert waits and summary.queued == 1500
    run_models(store)
    assert state(store, "b1").status == "completed"


def test_followers_of_a_dedupe_have_their_models_answers(store: BatchStore, tmp_path: Path) -> None:
    lines = [chat_line(f"r{n}", "the same", model=MODELS[n % 3], temperature=0) for n in range(30)]
    path = write_lines(tmp_path / "in", lines)
    submit(store, path, routed(replace(ONCE, dedupe=True), store, "warmq"))
    assert [names(store, queue) for queue in QUEUES.values()] == [["r0"], ["r1"], ["r2"]]
    run_models(store)
    assert counts(state(store, "b1")) == {"completed": 30}


def test_a_queue_that_no_worker_serves_any_more_is_told(
    redis_url: str, store: BatchStore, mixed: Path
) -> None:
    run_producer("submit", mixed, "--batch-id", "b1", redis_url=redis_url)
    announce(store, queue=QUEUES["alpha"], models={"alpha": QUEUES["alpha"]})
    shown = as_json(run_producer("status", "b1", "--json", redis_url=redis_url))
    assert [one["code"] for one in shown["stalls"]] == ["queue_unserved"] * 2
    told = " ".join(run_producer("status", "b1", redis_url=redis_url).stdout.split())
    assert "; no worker serves queue warmq.beta; no worker serves queue warmq.gamma" in told
    assert "no worker serves gamma (queue warmq.gamma); requests waiting: 400" in told


def test_older_workers_models_are_not_served(
    redis_url: str, store: BatchStore, mixed: Path
) -> None:
    announce(store, queue="warmq.delta", name="celery@b.12.0a1b2c3d", protocol=PROTOCOL - 1)
    path = write_lines(mixed.parent / "more", [chat_line("r0", model="delta")])
    done = run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)
    assert "no worker serves 'delta'" in done.stderr
