"""Ways that go through a queue: warmq, stock Celery and llmq, each with its worker kept warm."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
import time
from pathlib import Path

import orjson
from bench.common.load import hold, wait_ready
from bench.peers.ways import (
    ENGINE_ARGS,
    ENGINE_ENV,
    TOKENS,
    Found,
    body,
    check_file,
    end,
    write_file,
)
from celery import Celery

from contract.openai.body import CHAT_URL
from demo.stack import MODEL, ROOT, RedisServer, eventually, tiny_model_worker

PROGRAMS = Path(__file__).resolve().parent / "programs"


class Warmq:
    """warmq: the rate from a held batch's release to its last commit, the wall of the command."""

    name, warm = "warmq", True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = RedisServer(folder / "warmq-redis")
        self._worker = tiny_model_worker(
            self._server.url, folder / "warmq.log", engine_args=ENGINE_ARGS
        )
        self._runs = 0

    def start(self) -> None:
        """Start Redis and the real worker."""
        self._server.start()
        self._worker.start()
        with self._server.client() as client:
            wait_ready(client)

    def run(self, count: int) -> Found:
        """Release a queued batch; then submit a file and collect its answers with `producer`."""
        self._runs += 1
        with self._server.client() as client:
            held = hold(client, f"alternatives{self._runs}", count, body, url=CHAT_URL)
            began = held.release()
            rate = count * TOKENS / (held.wait() - began)
            client.flushdb()
            wait_ready(client)  # its entry went with the rest
        return {"tokens_per_s": rate, "wall_s": self.file(count, TOKENS)}

    def file(self, count: int, tokens: int) -> float:
        """Return how long `producer submit FILE -o ANSWERS` takes, in seconds."""
        given = write_file(self._folder / f"warmq-{count}-{tokens}.jsonl", count, tokens)
        answers = self._folder / "warmq-answers.jsonl"
        began = time.monotonic()
        subprocess.run(
            [Path(sys.executable).parent / "producer", "submit", given, "-o", answers],
            env=os.environ | {"WARMQ_REDIS_URL": self._server.url}, check=True,
            capture_output=True, timeout=300,
        )  # fmt: skip
        wall = time.monotonic() - began
        check_file(answers, count, tokens)
        answers.unlink()
        return wall

    def stop(self) -> None:
        """Drain the worker, stop Redis."""
        self._worker.stop()
        self._server.stop()


class StockCelery:
    """Stock Celery with the threads pool: the rate from a held queue's release, as for warmq.

    The wall is of sending one by one and waiting for all results.
    """

    warm = True

    def __init__(self, folder: Path, threads: int) -> None:
        self.name = f"stock Celery, --pool=threads -c {threads}"
        self._folder = folder
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._server = RedisServer(folder / "celery-redis")
        self._env = os.environ | ENGINE_ENV | {
            "STOCK_REDIS_URL": self._server.url, "STOCK_MODEL": str(MODEL),
            "STOCK_ARGS": ENGINE_ARGS,
        }  # fmt: skip

    def start(self) -> None:
        """Start Redis and the worker; it consumes once its engine is there."""
        self._server.start()
        self._app = Celery(broker=self._server.url, backend=self._server.url)
        self._task = self._app.signature("stock.generate")
        with (self._folder / "celery.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "celery", "-A", "stock_celery", "worker",
                    "--pool=threads", f"-c{self._threads}", "--without-gossip",
                    "--without-mingle", "--without-heartbeat", "--loglevel=WARNING",
                ],
                cwd=PROGRAMS, env=self._env | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        eventually(self._answers, 120, f"Celery's worker answers: {self._folder}/celery.log", 0.3)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "Celery's worker ended"
        return bool(self._app.control.ping(timeout=1, limit=1))

    def run(self, count: int) -> Found:
        """Release a queued file; then send it again as a user does, and wait."""
        seconds = self._held(count)
        began = time.monotonic()
        for answer in [self._task.apply_async([body(n)]) for n in range(count)]:
            answer.get(timeout=300)
        return {"tokens_per_s": count * TOKENS / seconds, "wall_s": time.monotonic() - began}

    def _held(self, count: int) -> float:
        """Return seconds from the release of `count` queued tasks to the last result."""
        ids = [self._task.apply_async([body(n)], queue="held").id for n in range(count)]
        names = [f"celery-task-meta-{task_id}" for task_id in ids]
        with self._server.client() as client:
            began = time.time()
            client.rename("held", "celery")
            eventually(lambda: client.exists(*names) == count, 300, "all results", 0.05)
            found = [orjson.loads(text) for text in client.mget(names)]
            client.delete(*names)
        assert {it["result"]["tokens"] for it in found} == {TOKENS}, found[0]
        return max(dt.datetime.fromisoformat(it["date_done"]).timestamp() for it in found) - began

    def stop(self) -> None:
        """Stop the worker, then Redis."""
        end(self._process)
        self._server.stop()
