"""Commands of Celery that would have a worker's Celery consumer take tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from celery import Celery
from kit.protocol.lessee import QUEUE, chat
from kit.stacks.celery_side import client_app, send, simulated, stats

from contract import naming
from demo.stack import RedisServer, eventually
from worker.process.bootstep import CONTROL_QUEUE


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Celery, redis.Redis]]:
    """Run a Redis and a worker for the tests of this file."""
    folder = tmp_path_factory.mktemp("stack")
    with (
        RedisServer(folder / "redis", "--appendonly", "no") as server,
        simulated(server.url, folder / "worker.log"),
        server.client() as client,
    ):
        app = client_app(server.url)
        eventually(lambda: stats(app).get("state") == "ready", 20, "the worker is ready", 0.1)
        yield app, client
        app.close()


def told(app: Celery, command: str, **arguments: object) -> str:
    """Return in what words the one worker refuses a command."""
    (reply,) = app.control.broadcast(command, arguments=arguments, reply=True, timeout=5, limit=1)
    (said,) = reply.values()
    return str(said["error"])


def test_commands_that_would_read_a_queue_are_refused_in_words(
    stack: tuple[Celery, redis.Redis],
) -> None:
    app, _ = stack
    assert "WARMQ_QUEUE" in told(app, "add_consumer", queue=QUEUE)
    assert "WARMQ_QUEUE" in told(app, "add_consumer", queue="images", routing_key="x")
    assert "WARMQ_QUEUE" in told(app, "cancel_consumer", queue=CONTROL_QUEUE)
    assert "task ids" in told(app, "revoke_by_stamped_headers", headers={"a": "b"})


def test_requests_sent_after_add_consumer_are_answered(
    stack: tuple[Celery, redis.Redis],
) -> None:
    app, _ = stack
    app.control.add_consumer(QUEUE)
    sent = [send(app, chat(f"{n}"), priority=(0, 6)[n % 2]) for n in range(60)]
    answers = [one.get(timeout=30)["object"] for one in sent]
    assert answers == ["chat.completion"] * 60


def test_tasks_of_another_application_stay_in_their_lists(
    stack: tuple[Celery, redis.Redis],
) -> None:
    app, client = stack
    app.control.add_consumer("images")  # to all workers of this Redis, as Celery has it
    sent = [
        app.send_task("images.resize", args=[n], queue=queue, priority=priority)
        for n in range(10)
        for queue in ("images", CONTROL_QUEUE)
        for priority in (0, 6)
    ]
    app.control.cancel_consumer("images")
    assert send(app, chat()).get(timeout=30)
    (pong,) = app.control.inspect(timeout=5, limit=1).ping().values()  # type: ignore[union-attr]
    assert pong == {"ok": "pong"}
    for queue in ("images", CONTROL_QUEUE):
        for priority in (0, 6):
            assert client.llen(naming.priority_list(queue, priority)) == 10
    assert {result.state for result in sent} == {"PENDING"}
