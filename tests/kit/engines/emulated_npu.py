"""An EMULATED NPU under the whole of warmq: real vllm-rbln and optimum-rbln over our `rebel`.

Nothing here has seen an NPU, and no time taken here says anything about one.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from kit.commands.support import producer_command, producer_env
from kit.engines.emulated_batch import Run

from contract import naming
from contract.redis.batches import BatchStore
from demo.stack import ROOT, RedisServer, Worker, eventually

STAND_IN = ROOT / "tests" / "rbln" / "stand_in"
READY_S = 180
#: With this a batch lasts long enough to be hit in the middle.
SLOW_STEP_S = "0.05"


def emulated_env(folder: Path) -> dict[str, str]:
    """Return what makes a process use the stand-in, with its faults controlled in `folder`."""
    return {"PYTHONPATH": str(STAND_IN), "WARMQ_TEST_REBEL": str(folder), "HF_HUB_OFFLINE": "1"}


class Emulated:
    """One worker on emulated cards, and the producer's command line for its queue.

    `settings` are the worker's, without WARMQ_; the Redis and `cards`, the folder of the
    machine's cards, may be shared with others.
    """

    def __init__(self, redis: RedisServer, cards: Path, folder: Path, **settings: object) -> None:
        self.folder = folder
        self.redis = redis
        self.cards = cards
        self.settings: dict[str, object] = {
            "lease_s": 10, "drain_timeout_s": 5, "rebuild_tries": 1, "kill_grace_s": 5,
            "engine_log": "-",  # tests read vLLM's lines in the worker's log
        } | settings  # fmt: skip
        self.control = folder / "rebel"
        self.control.mkdir(parents=True)
        self.store = BatchStore(redis.client(), ttl_ms=600_000)
        self.worker: Worker | None = None
        self._read_from = 0

    @property
    def queue(self) -> str:
        """The queue that the worker drains."""
        name = self.settings.get("served_model_name")
        return naming.queue_name(None if name is None else str(name), naming.DEFAULT_QUEUE)

    def begin(self, **settings: object) -> Worker:
        """Start the worker as the Procfile says; it is not ready yet when this returns."""
        self.settings |= settings
        self.worker = Worker(
            self.redis.url, self.folder / "worker.log",
            env=emulated_env(self.control) | {
                "WARMQ_TEST_REBEL_CARDS": str(self.cards),
                "VLLM_LOGGING_LEVEL": "DEBUG",  # how an engine was ended is told
            },
            **self.settings,
        ).start()  # fmt: skip
        return self.worker

    def begin_unless_running(self) -> Worker:
        """Return the running worker; start it if it has ended, or never began."""
        worker = self.worker
        if worker is None or worker.process is None or worker.process.poll() is not None:
            worker = self.begin()
        return worker

    def ready(self) -> None:
        """Start the worker if none runs, and wait until it says it is ready."""
        worker = self.begin_unless_running()

        def announced() -> bool:
            assert worker.process is not None
            assert worker.process.poll() is None, self.log(whole=True)[-3000:]
            return self.state() == "ready"

        eventually(announced, READY_S, "the emulated engine is ready", 0.2)

    def state(self) -> str:
        """Return what the worker says it is doing; '' before it says anything."""
        assert self.worker is not None
        mine = f".{self.worker.pid}."
        told = (w["state"] for w in self.store.workers(self.queue) if mine in w["id"])
        return next(told, "")

    def submit(
        self, name: str, lines: Sequence[Mapping[str, Any]], model: str = ""
    ) -> subprocess.Popen[str]:
        """Start `producer submit` with these lines, to its end."""
        file = self.folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = ["submit", file, "--batch-id", name, "-o", self.folder / f"{name}.out",
                 "--errors", self.folder / f"{name}.err",
                 "--model", model or self.settings.get("served_model_name", "")]  # fmt: skip
        return subprocess.Popen(
            producer_command(*map(str, words)), env=producer_env(self.redis.url), cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def in_the_middle(self, name: str, lines: Sequence[Mapping[str, Any]]) -> subprocess.Popen[str]:
        """Submit; return once these requests decode, slowly enough to be hit there."""
        self.fault("slow", SLOW_STEP_S)
        begun = len(self.steps())
        producer = self.submit(name, lines)
        eventually(lambda: len(self.decodes(begun)) > 2, 60, "decoding")
        return producer

    def collect(self, name: str, producer: subprocess.Popen[str], timeout_s: float = 120) -> Run:
        """Wait for the producer and read what it wrote."""
        said, _ = producer.communicate(timeout=timeout_s)
        assert producer.returncode in {0, 1}, said
        return Run.read(self.folder / f"{name}.out", self.folder / f"{name}.err")

    def run(self, name: str, lines: Sequence[Mapping[str, Any]]) -> Run:
        """Submit and collect."""
        return self.collect(name, self.submit(name, lines))

    def steps(self) -> list[tuple[str, int, int]]:
        """Return the device's steps so far: kind, compiled rows, rows with a request."""
        file = self.control / "steps"
        words = [x.split() for x in file.read_text().splitlines()] if file.exists() else []
        return [(kind, int(rows), int(live)) for kind, rows, live in words]

    def decodes(self, since: int = 0) -> list[tuple[int, int]]:
        """Return (compiled rows, rows with a request) of the decode steps since that step."""
        return [(rows, live) for kind, rows, live in self.steps()[since:] if kind == "decode"]

    def prefills(self, since: int = 0) -> int:
        """Return how many prompt chunks were computed since that step."""
        return sum(kind == "prefill" for kind, _, _ in self.steps()[since:])

    def fault(self, name: str, text: str = "") -> None:
        """Switch a fault on."""
        (self.control / name).write_text(text)

    def clear(self, *names: str) -> None:
        """Switch faults off; all of them if none is named."""
        for name in names or ("raise", "refuse-load", "hang", "slow"):
            (self.control / name).unlink(missing_ok=True)

    def new_page(self) -> None:
        """From now on `log` shows only what comes; no fault is on."""
        self.clear()
        self._read_from = len(self.log(whole=True))

    def log(self, whole: bool = False) -> str:
        """Return the worker's log since the new page, or all of it."""
        file = self.folder / "worker.log"
        text = file.read_text(errors="replace") if file.exists() else ""
        return text if whole else text[self._read_from :]

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
        self.store.close()
