"""Why a worker does not serve yet, or ended, is told to those who wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.drain.draining import draining, soon
from kit.protocol.lessee import chat, submit_batch
from kit.servers.stub_server import StubProcess
from kit.stacks.celery_side import client_app, stats
from kit.stacks.eventful import totals

from contract.redis.batches import BatchStore
from demo.stack import Worker, eventually, free_port
from producer.queue_workers import QueueWorkers
from worker.drain import sweeper
from worker.drain.announcement import REASON_CHARACTERS, without_secrets
from worker.engine.catalogue import load_settings

pytestmark = pytest.mark.timeout(120)


def texts(store: BatchStore) -> str:
    """Return what `submit --wait`, `watch` and `status` say of the workers."""
    return QueueWorkers(store, "warmq").text()


@contextmanager
def running(redis_url: str, log: Path, **settings: Any) -> Iterator[Worker]:
    """Run a worker with these settings, and kill it in the end."""
    worker = Worker(redis_url, log, **settings)
    worker.start()
    try:
        yield worker
    finally:
        worker.kill()


def test_a_worker_that_waits_for_its_server_says_for_which_and_why(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    port = free_port()
    urls = {"openai_base_urls": f"http://127.0.0.1:{port}/v1", "openai_api_key": "s3cret"}
    why = f"waits for 127.0.0.1:{port}: cannot be reached: connection refused"
    app = client_app(redis_url)
    with running(redis_url, tmp_path / "log", engine="openai", **urls) as worker:
        expected = f"workers: starting ({why})"
        eventually(lambda: texts(store) == expected, 30, "its reason is announced")
        eventually(lambda: stats(app).get("why") == why, 30, "inspect shows it too", 0.2)
        assert worker.stop() == 0
    eventually(lambda: texts(store) == "no worker serves queue warmq", 10, "it said goodbye")
    app.close()


def test_a_worker_whose_server_rests_says_what_the_server_says(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    port = free_port()
    page = f"http://127.0.0.1:{port}"
    with StubProcess() as server, running(
        redis_url, tmp_path / "log", engine="openai", openai_base_urls=server.url,
        metrics_port=port,
    ):  # fmt: skip
        eventually(lambda: texts(store) == "workers: ready", 30, "it is ready")
        assert totals(page)["warmq_engine_waits"] == 0
        submit_batch(store, bodies=[chat(user="stub:status=429,retry_after=600")])
        name = server.url.removeprefix("http://").removesuffix("/v1")
        expected = f"workers: ready (waits for {name}: scripted 429)"
        eventually(lambda: texts(store) == expected, 30, "it is announced")
        assert totals(page)["warmq_engine_waits"] == 1


def test_a_worker_whose_engine_cannot_start_leaves_its_reason(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    model = tmp_path / "nope"
    log = tmp_path / "log"
    with running(redis_url, log, engine="vllm", model=model) as worker:
        eventually(lambda: worker.process and worker.process.poll() is not None, 30, "it ends")
    why = f"the engine failed to start: WARMQ_MODEL: there is no folder {model}. Name the folder"
    text = texts(store)
    assert text.startswith("no worker serves queue warmq any more: the last one, ")
    assert f"(stopped: {why}" in text
    assert "Traceback" not in log.read_text()
    assert log.read_text().count("there is no folder") == 1


async def test_a_worker_announces_at_once_that_it_is_ready(
    redis_url: str, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "SWEEP_S", 600.0)  # what the next sweep would wait for
    async with draining(redis_url, lease_s=6000):
        await soon(lambda: texts(store) == "workers: ready", 10, "it is announced")


def test_a_reason_is_one_line_and_not_too_long_and_holds_no_secret() -> None:
    settings = load_settings(
        engine="openai", openai_base_urls="http://a/v1", openai_api_key="k3y-of-mine",
        redis_url="redis://me:pa55%40word@host:1/0", _env_file=None,
    )  # fmt: skip
    url = settings.redis_url.get_secret_value()
    told = without_secrets(f"\nrefused: k3y-of-mine at {url} pa55@word\nat line 2", settings)
    assert told == "refused: *** at *** ***"
    assert without_secrets("", settings) == ""
    assert len(without_secrets("x" * 5000, settings)) == REASON_CHARACTERS
