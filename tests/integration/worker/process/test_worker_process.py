"""The worker process, started from the Procfile's line, with the simulated engine."""

from __future__ import annotations

import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from kit.protocol.lessee import QUEUE, chat, queued_ids, stored, submit_batch
from kit.stacks.celery_side import in_flight, send, serving, simulated, stats

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import ROOT, Worker, environment_of, eventually, procfile_command
from worker.engine.simulated.engine import digest

LONG = "simulate:sleep=600"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Celery, redis.Redis]]:
    """Run a Redis and a worker with two slots and no look-ahead for the tests of this file."""
    folder = tmp_path_factory.mktemp("stack")
    with serving(folder, simulated_slots=2, look_ahead=0) as (app, client, _):
        app.conf.result_backend_thread_safe = True
        yield app, client


@pytest.fixture
def app(stack: tuple[Celery, redis.Redis]) -> Celery:
    return stack[0]


# -- Celery clients --------------------------------------------------------------------


def test_ping_is_answered(app: Celery) -> None:
    (reply,) = app.control.inspect(timeout=2, limit=1).ping().values()  # type: ignore[union-attr]
    assert reply == {"ok": "pong"}


def test_the_command_line_of_celery_answers_too(stack: tuple[Celery, redis.Redis]) -> None:
    port = stack[1].connection_pool.connection_kwargs["port"]
    command = [procfile_command()[0], "-A", "worker.app", "inspect", "ping", "--timeout=3"]
    env = environment_of({"redis_url": f"redis://127.0.0.1:{port}/0"})
    answer = subprocess.check_output(command, cwd=ROOT, env=env, text=True, timeout=30)
    assert "pong" in answer


def test_stats_tell_the_truth_about_capacity_and_load(app: Celery) -> None:
    before = stats(app)
    assert before["queue"] == QUEUE
    assert (before["engine"], before["max_num_seqs"], before["in_flight_limit"]) == (
        "simulated", 2, 2,
    )  # fmt: skip
    running = [send(app, chat(f"{n}", user=LONG)) for n in range(3)]
    eventually(lambda: stats(app)["in_flight"] == 2, 5)
    # The third waits in the queue, where priorities still bind.
    assert in_flight(app) <= {result.id for result in running}
    app.control.revoke([result.id for result in running])
    eventually(lambda: stats(app)["in_flight"] == 0, 5)
    after = stats(app)
    assert after["counts"]["popped"] - before["counts"]["popped"] == 2
    assert after["counts"]["cancelled"] - before["counts"]["cancelled"] == 2


@pytest.mark.parametrize("body", [chat("Hello"), {"prompt": "Hello"}], ids=["chat", "completion"])
def test_send_task_and_get_return_the_response_body(app: Celery, body: dict[str, Any]) -> None:
    answer = send(app, body).get(timeout=10)
    assert answer["object"] == ("chat.completion" if "messages" in body else "text_completion")
    assert digest(body) in str(answer["choices"][0])
    assert answer["usage"]["total_tokens"] == 2


def test_the_result_of_a_failure_raises_with_its_text(app: Celery) -> None:
    result = send(app, chat(max_tokens=0))
    with pytest.raises(Exception, match="max_tokens") as caught:
        result.get(timeout=10)
    assert type(caught.value).__name__ == "RequestRejected"
    assert AsyncResult(result.id, app=app).state == "FAILURE"


def test_the_task_id_option_names_the_result(
    app: Celery, stack: tuple[Celery, redis.Redis]
) -> None:
    name = f"mine-{uuid.uuid4()}"
    assert send(app, chat(), task_id=name).get(timeout=10)["id"] == name
    assert stored(stack[1], name)["task_id"] == name  # type: ignore[index]


def test_the_priority_option_overtakes(app: Celery) -> None:
    blockers = [send(app, chat(f"{n}", user=LONG)) for n in range(2)]
    eventually(lambda: len(in_flight(app)) == 2, 5)
    low = [send(app, chat(f"{n}", user="simulate:sleep=0.2"), priority=9) for n in range(6)]
    high = send(app, chat("high"), priority=0)
    app.control.revoke([result.id for result in blockers])
    high.get(timeout=10)
    assert sum(result.ready() for result in low) <= 2
    assert [result.get(timeout=10)["object"] for result in low] == ["chat.completion"] * 6


def test_the_expires_option_is_honoured(app: Celery) -> None:
    blockers = [send(app, chat(f"{n}", user=LONG)) for n in range(2)]
    eventually(lambda: len(in_flight(app)) == 2, 5)
    late = send(app, chat("late"), expires=0.1)
    with pytest.raises(TimeoutError):
        eventually(late.ready, 0.3, every_s=0.05)
    app.control.revoke([result.id for result in blockers])
    with pytest.raises(TaskRevokedError, match="before its deadline"):
        late.get(timeout=10)


def test_revoke_stops_a_running_request(app: Celery) -> None:
    result = send(app, chat(user=LONG))
    eventually(lambda: result.id in in_flight(app), 5)
    app.control.revoke(result.id, terminate=True)
    with pytest.raises(TaskRevokedError, match="cancelled by the user"):
        result.get(timeout=5)
    eventually(lambda: result.id not in in_flight(app), 5)
    assert result.state == "REVOKED"


def test_the_terminate_command_stops_a_running_request_too(app: Celery) -> None:
    result = send(app, chat(user=LONG))
    eventually(lambda: result.id in in_flight(app), 5)
    app.control.broadcast("terminate", arguments={"signal": "KILL", "task_id": [result.id]})
    with pytest.raises(TaskRevokedError, match="cancelled by the user"):
        result.get(timeout=5)


def test_revoke_changes_no_result_that_is_there(
    app: Celery, stack: tuple[Celery, redis.Redis]
) -> None:
    result = send(app, chat())
    answer = result.get(timeout=10)
    app.control.revoke(result.id, reply=True, timeout=2, limit=1)
    assert AsyncResult(result.id, app=app).get(timeout=5) == answer


def test_revoke_of_a_batch_request_is_counted_in_its_batch(
    app: Celery, stack: tuple[Celery, redis.Redis]
) -> None:
    store = BatchStore(stack[1], ttl_ms=60_000)
    bodies = [chat(f"{n}", user=LONG) for n in range(3)]
    submitted = submit_batch(store, batch_id="revoked", bodies=bodies)
    eventually(lambda: set(submitted.ids[:2]) == in_flight(app), 5)
    app.control.revoke(submitted.ids)
    batch = eventually(
        lambda: (found := store.batch("revoked")) and found.finished and found, 5, "it is finished"
    )
    assert batch.number("cancelled") == 3


def test_revoke_drops_a_queued_request(app: Celery) -> None:
    blockers = [send(app, chat(f"{n}", user=LONG)) for n in range(2)]
    eventually(lambda: len(in_flight(app)) == 2, 5)
    popped = stats(app)["counts"]["popped"]
    queued = send(app, chat(user=LONG))
    queued.revoke()
    app.control.revoke([result.id for result in blockers])
    with pytest.raises(TaskRevokedError):
        queued.get(timeout=5)
    assert stats(app)["counts"]["popped"] == popped


def test_countdown_fails_at_once_and_says_so(app: Celery) -> None:
    with pytest.raises(Exception, match="eta/countdown is not supported"):
        send(app, chat(), countdown=60).get(timeout=10)


def test_a_chain_fails_at_once_and_says_so(app: Celery) -> None:
    first = app.signature(naming.TASK_NAME, args=[chat()], queue=QUEUE)
    second = app.signature(naming.TASK_NAME, queue=QUEUE)
    chained = (first | second).apply_async()
    with pytest.raises(Exception, match="chain is not supported"):
        chained.parent.get(timeout=10)


# -- its end ------------------------------------------------------------------------------


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker."""
    started: list[Worker] = []

    def run(**settings: Any) -> Worker:
        log = tmp_path / f"worker{len(started)}.log"
        started.append(simulated(redis_url, log, lease_s=60, **settings).start())
        return started[-1]

    yield run
    for worker in started:
        worker.kill()


def leased(client: redis.Redis) -> int:
    return int(client.zcard(keys.LEASES))


def test_sigterm_finishes_what_runs_hands_the_rest_back_and_exits_with_0(
    start: Callable[..., Worker], redis_client: redis.Redis, store: BatchStore
) -> None:
    bodies = [chat(f"{n}", user="simulate:sleep=1") for n in range(20)]
    submitted = submit_batch(store, bodies=bodies)
    worker = start(simulated_slots=4, look_ahead=4)
    eventually(lambda: leased(redis_client) == 8, 20)
    assert worker.stop(15) == 0
    batch = store.batch("b1")
    assert batch is not None
    finished = batch.number("completed")
    assert finished in (4, 8)  # the first four, or the first eight if it was popping just then
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids[finished:]
    assert leased(redis_client) == 0
    assert redis_client.hlen(keys.WORKERS) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_second_signal_hands_everything_back_at_once(
    start: Callable[..., Worker], redis_client: redis.Redis, store: BatchStore, second: int
) -> None:
    submitted = submit_batch(store, bodies=[chat(f"{n}", user=LONG) for n in range(6)])
    worker = start(simulated_slots=4, look_ahead=1, drain_timeout_s=300)
    eventually(lambda: leased(redis_client) == 5, 20)
    assert worker.process is not None
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: leased(redis_client) == 4)  # the look-ahead is back: it drains
    worker.process.send_signal(second)
    worker.process.wait(5)
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids
    assert leased(redis_client) == 0
    assert redis_client.hlen(keys.DEATHS) == 0


def test_a_second_worker_continues_what_the_first_handed_back(
    start: Callable[..., Worker], redis_client: redis.Redis, store: BatchStore
) -> None:
    submit_batch(store, bodies=[chat(f"{n}", user="simulate:sleep=0.4") for n in range(12)])
    first = start(simulated_slots=2)
    eventually(lambda: store.batch("b1").number("completed") >= 2, 20)  # type: ignore[union-attr]
    start(simulated_slots=4)
    assert first.stop(15) == 0
    eventually(lambda: store.batch("b1").finished, 15)  # type: ignore[union-attr]
    assert store.batch("b1").number("completed") == 12  # type: ignore[union-attr]


def test_a_drain_that_dies_takes_the_process_with_it(
    start: Callable[..., Worker], redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat(user="simulate:die")])
    worker = start(rebuild_tries=0)
    assert worker.process is not None
    assert worker.process.wait(15) == 1
    log = worker.log_path.read_text()
    assert "the drain ended: the engine could not be rebuilt" in log
    assert queued_ids(redis_client, submitted.list_key) == submitted.ids
    assert leased(redis_client) == 0
