"""An EMULATED NPU under the whole of warmq: real vllm-rbln and optimum-rbln over our `rebel`.

Nothing here has seen an NPU, and no time taken here says anything about one.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support import producer_command, producer_env

from contract.store import BatchStore
from demo.stack import ROOT, RedisServer, Worker, eventually

STAND_IN = ROOT / "tests" / "rbln" / "stand_in"
READY_S = 120
#: Tokens asked of every request whose tokens are compared.
COUNT = 12


def emulated_env(folder: Path) -> dict[str, str]:
    """Return what makes a process use the stand-in, with its faults controlled in `folder`."""
    return {"PYTHONPATH": str(STAND_IN), "WARMQ_FAKE_REBEL": str(folder), "HF_HUB_OFFLINE": "1"}


@dataclass
class Run:
    """One finished batch: output lines and error lines by custom_id."""

    answers: dict[str, dict[str, Any]]
    errors: dict[str, dict[str, Any]]

    def tokens(self, custom_id: str) -> list[int]:
        """Return the tokens of one answer."""
        body = self.answers[custom_id]["response"]["body"]
        found: list[int] = body["choices"][0]["token_ids"]
        return found


class Emulated:
    """A private Redis, one worker on an emulated NPU, the producer's command line."""

    def __init__(self, redis: RedisServer, folder: Path) -> None:
        self.folder = folder
        self.redis = redis
        self.control = folder / "rebel"
        self.control.mkdir(parents=True)
        self.store = BatchStore(redis.client(), ttl_ms=600_000)
        self.worker: Worker | None = None

    def start(self, model: Path, **settings: object) -> Worker:
        """Start the worker as the Procfile says; it may not be ready yet."""
        defaults = {"model": model, "lease_s": 5, "drain_timeout_s": 5, "rebuild_tries": 5}
        self.worker = Worker(
            self.redis.url, self.folder / "worker.log", env=emulated_env(self.control),
            **(defaults | settings),
        ).start()  # fmt: skip
        return self.worker

    def ready(self) -> dict[str, Any]:
        """Wait until the worker says it is ready; return what it says."""

        def announced() -> list[dict[str, Any]]:
            assert self.worker is not None and self.worker.process is not None
            assert self.worker.process.poll() is None, self.log()[-3000:]
            return [w for w in self.store.workers("warmq") if w["state"] == "ready"]

        return eventually(announced, READY_S, "the emulated engine is ready", 0.2)[0]

    def submit(self, name: str, lines: Sequence[Mapping[str, Any]]) -> subprocess.Popen[str]:
        """Start `producer submit` with these lines, to its end."""
        file = self.folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = ["submit", file, "--batch-id", name, "-o", self.folder / f"{name}.out",
                 "--errors", self.folder / f"{name}.err"]  # fmt: skip
        return subprocess.Popen(
            producer_command(*words), env=producer_env(self.redis.url), cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def collect(self, name: str, producer: subprocess.Popen[str], timeout_s: float = 120) -> Run:
        """Wait for the producer and read what it wrote."""
        said, _ = producer.communicate(timeout=timeout_s)
        assert producer.returncode in {0, 1}, said
        return Run(_lines(self.folder / f"{name}.out"), _lines(self.folder / f"{name}.err"))

    def run(self, name: str, lines: Sequence[Mapping[str, Any]]) -> Run:
        """Submit and collect."""
        return self.collect(name, self.submit(name, lines))

    def steps(self) -> list[tuple[str, int, int]]:
        """Return the device's steps so far: kind, compiled rows, rows with a request."""
        file = self.control / "steps"
        words = [x.split() for x in file.read_text().splitlines()] if file.exists() else []
        return [(kind, int(rows), int(live)) for kind, rows, live in words]

    def fault(self, name: str, text: str = "") -> None:
        """Switch a fault on."""
        (self.control / name).write_text(text)

    def clear(self, name: str) -> None:
        """Switch a fault off."""
        (self.control / name).unlink()

    def log(self) -> str:
        """Return the worker's log so far."""
        return (self.folder / "worker.log").read_text(errors="replace")

    def logged(self, text: str, timeout_s: float = 60) -> None:
        """Wait for words in the worker's log."""
        eventually(lambda: text in self.log(), timeout_s, f"{text!r} in {self.folder}", 0.1)

    def engine_process(self) -> psutil.Process:
        """Return the process that runs the steps."""
        assert self.worker is not None
        children = psutil.Process(self.worker.pid).children(recursive=True)
        return next(c for c in children if "EngineCore" in " ".join([c.name(), *c.cmdline()]))

    def close(self) -> None:
        """End the worker, whatever state it is in."""
        if self.worker is not None:
            self.worker.kill()
        self.store.redis.close()


def _lines(file: Path) -> dict[str, dict[str, Any]]:
    if not file.exists():
        return {}
    read = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["custom_id"]: line for line in read}


@contextmanager
def emulated(folder: Path) -> Iterator[Emulated]:
    """Yield an emulated stack without a worker; end everything afterwards."""
    with RedisServer(folder / "redis") as redis:
        stack = Emulated(redis, folder / "stack")
        try:
            yield stack
        finally:
            stack.close()


def prompts(count: int, seed: int = 4) -> list[list[int]]:
    """Return token prompts of 3 to 200 tokens: shorter and longer than a prefill chunk."""
    draw = random.Random(seed)
    return [[draw.randrange(4, 1024) for _ in range(draw.randint(3, 200))] for _ in range(count)]


def lines_of(prompts: Sequence[list[int]], count: int = COUNT) -> list[dict[str, Any]]:
    """Return request lines that ask for so many greedy tokens each."""
    return [
        {
            "custom_id": f"r{n}", "prompt": prompt, "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }
        for n, prompt in enumerate(prompts)
    ]  # fmt: skip
