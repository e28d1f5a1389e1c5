"""A real Flower beside a real worker process: what its pages' data say of a batch."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.support import batch_file, run_producer
from kit.stacks.celery_side import client_app, send, simulated

from demo.stack import eventually, free_port

REQUESTS = 500
BODY = {"prompt": "Hello", "max_tokens": 4}


def asked(url: str, path: str) -> Any:
    """Return what Flower's API answers; None while it cannot."""
    try:
        with urllib.request.urlopen(f"{url}/api/{path}", timeout=20) as answer:
            return orjson.loads(answer.read())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


@pytest.fixture
def flower(redis_url: str, tmp_path: Path) -> Iterator[str]:
    """Return the URL of a Flower that reads the events of this Redis."""
    port = free_port()
    options = f"--address=127.0.0.1 --port={port} --enable_events=True".split()
    with (tmp_path / "flower.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", f"--broker={redis_url}", "flower", *options],
            stdout=log, stderr=log, cwd=tmp_path,
            env=os.environ | {"FLOWER_UNAUTHENTICATED_API": "true"},
        )  # fmt: skip
    try:
        eventually(lambda: asked(f"http://127.0.0.1:{port}", "tasks") is not None, 60, "Flower")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.timeout(180)
def test_flower_shows_the_worker_and_each_request_of_a_batch_while_it_runs_and_after(
    redis_url: str, tmp_path: Path, flower: str
) -> None:
    def states() -> Counter[str]:
        tasks = asked(flower, f"tasks?limit={2 * REQUESTS}&taskname=warmq.generate") or {}
        return Counter(t["state"] for t in tasks.values() if "'batch': 'b'" in (t["kwargs"] or ""))

    worker = simulated(redis_url, tmp_path / "log", simulated_slots=16, simulated_latency_s=0.2)
    with worker:
        (name,) = eventually(lambda: asked(flower, "workers?refresh=true"), 60, "the worker")
        # Flower asks for events when it sees the worker, and the worker's front end begins then.
        with client_app(redis_url) as app:
            eventually(lambda: send(app, BODY) and asked(flower, "tasks"), 30, "an event", 0.2)
        lines = batch_file(tmp_path / "in.jsonl", REQUESTS)
        done = run_producer("submit", lines, "--batch-id", "b", redis_url=redis_url)
        assert done.returncode == 0, done.stderr
        eventually(lambda: states()["STARTED"], 60, "some run")
        eventually(lambda: states() == {"SUCCESS": REQUESTS}, 60, "all have ended", 0.5)
        tasks = asked(flower, f"tasks?limit={2 * REQUESTS}&workername={name}")
        one = next(task for task in tasks.values() if "'r7'" in task["kwargs"])
        assert one["worker"] == name
        assert (one["name"], one["args"]) == ("warmq.generate", "()")
        assert "'batch': 'b'" in one["kwargs"]
        assert one["runtime"] > 0
        assert "tokens" in one["result"]
        (stats,) = (asked(flower, "workers?refresh=true") or {}).values()
        assert stats["stats"]["total"]["warmq.generate"] >= REQUESTS
        page = urllib.request.urlopen(f"{flower}/metrics", timeout=20).read().decode()
        assert "flower_events_total{" in page
