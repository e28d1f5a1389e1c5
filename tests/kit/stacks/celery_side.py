"""The worker process with the simulated engine, as a Celery client sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from celery.result import AsyncResult
from kit.protocol.lessee import QUEUE

from contract import naming
from demo.stack import RedisServer, Worker, eventually


class ClientApp(Celery):
    """A client's app that lets go of its results when it is closed; close it before its Redis ends.

    A failed test's traceback holds its results until Python ends. Celery would then look for their
    Redis for 20 s each, and raise: in place of pytest's totals stood a traceback.
    """

    def close(self) -> None:
        consumer = self.backend.result_consumer
        consumer.subscribed_to.clear()
        consumer.stop()
        super().close()


def client_app(url: str) -> ClientApp:
    """Return a Celery app that knows only the broker's URL; `with` closes it."""
    return ClientApp("stranger", broker=url, backend=url, set_as_current=False)


def simulated(url: str, log: Path, **settings: Any) -> Worker:
    """Return a worker with the simulated engine, without latency."""
    return Worker(url, log, **({"engine": "simulated", "simulated_latency_s": 0} | settings))


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[tuple[Celery, redis.Redis, str]]:
    """Run a Redis and a worker that is ready; yield a client's app, Redis and its URL."""
    with (
        RedisServer(folder / "redis", "--appendonly", "no") as server,
        simulated(server.url, folder / "worker.log", **settings),
        server.client() as client,
        client_app(server.url) as app,
    ):
        eventually(lambda: stats(app).get("state") == "ready", 20, "the worker is ready", 0.1)
        yield app, client, server.url


def stats(app: Celery) -> dict[str, Any]:
    """Return what the one worker says about the drain, or {}."""
    replies = app.control.inspect(timeout=1, limit=1).stats() or {}
    (reply,) = replies.values() or [{}]
    return reply.get("warmq", {})


def send(app: Celery, body: dict[str, Any], **options: Any) -> AsyncResult:
    return app.send_task(naming.TASK_NAME, args=[body], queue=QUEUE, **options)


def in_flight(app: Celery) -> set[str]:
    replies = app.control.inspect(timeout=1, limit=1).active() or {}
    (requests,) = replies.values() or [[]]
    return {request["id"] for request in requests}
