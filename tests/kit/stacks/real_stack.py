"""The real stack for e2e tests, and questions that the shipped model can answer."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis
from celery import Celery

from contract.batch import Batch
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import ROOT, Worker, environment_of, eventually

# The generator of the questions that the shipped model was trained for.
sys.path.append(str(ROOT / "models" / "training"))

from prompt_forms import chat_messages, completion_prompt
from questions import Question, letter_questions, sum_questions

READY_S = 120


@dataclass
class Stack:
    """The running processes of one e2e run."""

    url: str
    folder: Path
    client: redis.Redis
    store: BatchStore
    app: Celery

    def producer(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run the installed command line to its end."""
        return subprocess.run(
            self.command(*words),
            env=self.environment(), text=True, capture_output=True, timeout=120, check=False,
        )  # fmt: skip

    def command(self, *words: str | Path) -> list[str]:
        """Return the argv of the installed command line."""
        return [str(Path(sys.executable).parent / "producer"), *map(str, words)]

    def environment(self) -> dict[str, str]:
        """Return an environment in which WARMQ_REDIS_URL is the only setting."""
        return environment_of({"redis_url": self.url})

    def batch(self, batch_id: str) -> Batch:
        """Return the state of a batch."""
        batch = self.store.batch(batch_id)
        assert batch is not None, batch_id
        return batch

    def stats(self, queue: str = "warmq") -> dict[str, Any]:
        """Return what the worker of a queue says about the drain, or {}."""
        alive = self.client.hlen(keys.WORKERS)
        replies = self.app.control.inspect(timeout=10, limit=max(1, alive)).stats() or {}
        ours = (reply.get("warmq", {}) for reply in replies.values())
        return next((reply for reply in ours if reply.get("queue") == queue), {})

    def in_flight(self, queue: str = "warmq") -> int:
        """Return how many requests the worker of a queue holds; -1 if it does not answer."""
        return int(self.stats(queue).get("in_flight", -1))

    def ready(self, worker: Worker, queue: str = "warmq") -> None:
        """Wait until the engine is ready, but not for a worker that died."""

        def look() -> bool:
            assert worker.process is not None
            assert worker.process.poll() is None, worker.log_path.read_text()[-3000:]
            return self.stats(queue).get("state") == "ready"

        eventually(look, READY_S, f"{worker.log_path} is ready", every_s=0.3)


@contextmanager
def frozen(worker: Worker) -> Iterator[None]:
    """Stop the worker and its engine while commands run that take longer to start than it to work.

    What happens inside happens between two steps of the engine, however slow the machine is.
    """
    os.killpg(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(worker.pid, signal.SIGCONT)


@contextmanager
def engine_frozen(worker: Worker) -> Iterator[None]:
    """Stop the engine's processes alone: the worker goes on, and nothing in flight can end."""
    parts = psutil.Process(worker.pid).children(recursive=True)
    for part in parts:
        part.suspend()
    try:
        yield
    finally:
        for part in parts:
            part.resume()


def asked(question: Question, chat: bool, **fields: Any) -> dict[str, Any]:
    """Return a body that asks a question in one of the two forms."""
    fields = {"max_tokens": 16, "temperature": 0} | fields
    if chat:
        return {"messages": chat_messages(question), **fields}
    return {"prompt": completion_prompt(question), **fields}


def listed_questions(count: int, seed: int = 1) -> list[Question]:
    """Return questions that the model answers without a fault: letters and sums."""
    known = [q for q in (*letter_questions(), *sum_questions()) if not q.held_out]
    return random.Random(seed).sample(known, count)


def text_of(body: dict[str, Any], choice: int = 0) -> str:
    """Return the text of a response body."""
    found = body["choices"][choice]
    return str(found["message"]["content"] if "message" in found else found["text"]).strip()


def write_jsonl(path: Path, lines: list[dict[str, Any]]) -> Path:
    """Write an input file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read an output file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
