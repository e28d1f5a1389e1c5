"""A private Redis, a worker from the Procfile's line with vLLM and the shipped model, and the
installed `producer`. A worker takes 15 to 30 s to start, so one serves most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.stacks.celery_side import client_app
from kit.stacks.real_stack import Stack

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, tiny_model_worker


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Return a running Redis; no worker yet."""
    folder = tmp_path_factory.mktemp("e2e")
    with RedisServer(folder / "redis") as server, server.client() as client:
        app = client_app(server.url)
        store = BatchStore(client, ttl_ms=600_000)
        yield Stack(server.url, folder, client, store, app)
        app.close()


@pytest.fixture(scope="session")
def worker(stack: Stack) -> Iterator[Worker]:
    """Return the worker of the default queue, ready."""
    with tiny_model_worker(stack.url, stack.folder / "worker.log") as running:
        stack.ready(running)
        yield running


@pytest.fixture(autouse=True)
def nothing_left_running(stack: Stack) -> Iterator[None]:
    """Cancel what a failed test leaves behind, so that only that test fails."""
    yield
    for batch in stack.store.batches():
        if not batch.finished:
            stack.store.cancel(batch)
