"""The contract that pins kombu's queue layout: run it against each kombu upgrade.

Stock client -> our POP -> our RELEASE -> stock worker, and our messages -> stock worker.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kombu
import orjson
import pytest
import redis
from celery import Celery
from kit.protocol.lessee import QUEUE, Lessee, chat, client_of, queued_ids, submit_batch
from kit.stacks.celery_side import client_app

from contract import naming
from contract.message import read_body, read_delivery
from contract.redis import keys
from contract.redis.batches import BatchStore

PRIORITIES = {None: QUEUE, 0: QUEUE, 2: QUEUE, 3: "warmq\x06\x163", 5: "warmq\x06\x163",
              6: "warmq\x06\x166", 8: "warmq\x06\x166", 9: "warmq\x06\x169"}  # fmt: skip


@pytest.fixture
def client(redis_url: str) -> Iterator[Celery]:
    """Return a Celery app that knows only the broker's URL."""
    with client_app(redis_url) as app:
        yield app


def consume(url: str, count: int) -> list[tuple[dict[str, Any], Any]]:
    """Take messages as kombu's own consumer does; return (headers, payload) of each."""
    taken: list[tuple[dict[str, Any], Any]] = []

    def take(payload: Any, message: kombu.Message) -> None:
        taken.append((message.headers, payload))
        message.ack()

    with (
        kombu.Connection(url) as connection,
        connection.Consumer(kombu.Queue(QUEUE), callbacks=[take], accept=["json"]),
    ):
        while len(taken) < count:
            connection.drain_events(timeout=10)
        with pytest.raises(socket.timeout):
            connection.drain_events(timeout=0.1)
    return taken


STOCK_APP = """
from celery import Celery

app = Celery("stock", broker={url!r}, backend={url!r})
app.conf.update(task_default_queue={queue!r}, worker_prefetch_multiplier=1)

@app.task(name={task!r})
def generate(body):
    return {{"echo": body}}
"""


@pytest.fixture
def stock_worker(redis_url: str, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Return a function that starts a stock Celery worker, which serves our task name."""
    text = STOCK_APP.format(url=redis_url, queue=QUEUE, task=naming.TASK_NAME)
    (tmp_path / "stock.py").write_text(text)
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        celery = str(Path(sys.executable).parent / "celery")
        started.append(
            subprocess.Popen(
                [celery, "-A", "stock", "worker", "--pool=solo", "--loglevel=WARNING"],
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    yield start
    for process in started:
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize("priority", PRIORITIES)
def test_stock_send_task_lands_in_the_list_that_we_expect(
    client: Celery, redis_client: redis.Redis, priority: int | None
) -> None:
    options = {} if priority is None else {"priority": priority}
    client.send_task(naming.TASK_NAME, args=[chat()], queue=QUEUE, task_id="t1", **options)
    assert queued_ids(redis_client, PRIORITIES[priority]) == ["t1"]
    assert PRIORITIES[priority] in naming.priority_lists(QUEUE)
    assert naming.priority_list(QUEUE, priority or 0) == PRIORITIES[priority]


def apply_async(app: Celery, body: dict[str, Any], **options: Any) -> None:
    @app.task(name=naming.TASK_NAME, shared=False)
    def generate(body: dict[str, Any]) -> None: ...

    generate.apply_async([body], queue=QUEUE, **options)


def send_task(app: Celery, body: dict[str, Any], **options: Any) -> None:
    app.send_task(naming.TASK_NAME, args=[body], queue=QUEUE, **options)


@pytest.mark.parametrize("send", [apply_async, send_task])
def test_what_stock_celery_sends_we_can_read(
    client: Celery, redis_client: redis.Redis, send: Callable[..., None]
) -> None:
    body = chat("größer als 2⁶³? \U0001f680", seed=2**62, stop=["\n"], temperature=0.25)
    send(client, body, task_id="t1", priority=6, expires=3600, ignore_result=True)
    (lease,) = Lessee(redis_client).pop()
    delivery = read_delivery(lease.id, lease.message)
    assert read_body(delivery) == body
    assert (delivery.request_id, delivery.task, delivery.batch) == ("t1", naming.TASK_NAME, "")
    assert delivery.ignore_result
    seconds, _ = redis_client.time()
    assert delivery.deadline is not None
    assert abs(delivery.deadline - seconds - 3600) < 5


def test_stock_messages_survive_our_pop_and_release_and_a_stock_consumer_takes_them(
    client: Celery, redis_client: redis.Redis, redis_url: str
) -> None:
    for priority in (9, 6, 3, 0):
        for n in range(2):
            send_task(client, chat(f"{priority}-{n}"), task_id=f"{priority}-{n}", priority=priority)
    worker = Lessee(redis_client)
    worker.release(*worker.pop())
    taken = consume(redis_url, 8)
    assert [headers["id"] for headers, _ in taken] == [
        f"{priority}-{n}" for priority in (0, 3, 6, 9) for n in range(2)
    ]
    args, kwargs, embed = taken[0][1]
    assert (args, kwargs) == ([chat("0-0")], {})
    assert set(embed) >= {"callbacks", "errbacks", "chain", "chord"}


def test_a_stock_worker_runs_what_stock_sent_and_we_released(
    client: Celery, redis_client: redis.Redis, stock_worker: Callable[[], None]
) -> None:
    results = [client.send_task(naming.TASK_NAME, args=[chat(f"{n}")], queue=QUEUE, priority=n)
               for n in (0, 3, 6, 9)]  # fmt: skip
    worker = Lessee(redis_client)
    assert worker.release(*worker.pop()) == 4
    stock_worker()
    answers = [result.get(timeout=20) for result in results]
    assert answers == [{"echo": chat(f"{n}")} for n in (0, 3, 6, 9)]


def test_a_stock_worker_runs_the_messages_that_we_write(
    client: Celery, store: BatchStore, stock_worker: Callable[[], None]
) -> None:
    bodies = [chat('"quoted" \\ ünïcode \U0001f680 \x7f'), {"prompt": [1, 2, 3], "stop": []}]
    submitted = submit_batch(store, bodies=bodies, priority=9)
    client_of(store).rename(submitted.list_key, PRIORITIES[9])
    stock_worker()
    answers = [client.AsyncResult(rid).get(timeout=20) for rid in submitted.ids]
    assert answers == [{"echo": body} for body in bodies]


def test_a_stock_consumer_sees_the_headers_that_we_write(
    redis_url: str, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    redis_client.rename(submitted.list_key, QUEUE)
    ((headers, payload),) = consume(redis_url, 1)
    assert headers["task"] == naming.TASK_NAME
    assert headers["id"] == headers["root_id"] == submitted.ids[0]
    assert headers["warmq"]["custom_id"] == "c1"
    assert payload[0] == [chat("question 1")]


def test_a_stock_clients_result_is_what_we_commit(
    client: Celery, redis_client: redis.Redis
) -> None:
    result = client.send_task(naming.TASK_NAME, args=[chat()], queue=QUEUE)
    worker = Lessee(redis_client, "w1")
    worker.done(*worker.pop())
    assert result.get(timeout=5) == {"by": "w1"}
    failing = client.send_task(naming.TASK_NAME, args=[chat()], queue=QUEUE)
    worker.done(*worker.pop(), outcome="failed")
    with pytest.raises(Exception, match="by w1") as caught:
        failing.get(timeout=5)
    assert type(caught.value).__name__ == "RequestFailed"


def test_our_leases_and_kombus_do_not_meet(
    client: Celery, redis_client: redis.Redis, redis_url: str
) -> None:
    """A stock worker's sweeper on the same database must not see what we hold."""
    send_task(client, chat(), task_id="ours")
    (lease,) = Lessee(redis_client).pop()
    with kombu.Connection(redis_url) as connection:
        connection.default_channel.qos.restore_visible(num=100)
    assert redis_client.llen(QUEUE) == 0
    assert redis_client.zscore(keys.LEASES, lease.id) is not None
    assert orjson.loads(lease.message)["headers"]["id"] == "ours"
