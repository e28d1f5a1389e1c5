"""The queue's own cost beside other queues', all over a simulated engine of the same latencies.

warmq's figures come from the same functions as part `overhead`. The others run in environments of
their own (overlay.py); their requests wait under a name that no worker reads, then come at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis
from bench.common import report
from bench.common.load import cpu_s, redis_calls
from bench.peers.overlay import CannotRun, environment, told, version
from bench.producer_cost.collection import COLLECTED, finished
from bench.producer_cost.submission import PRODUCER, submit, timed, write_file
from bench.worker_cost.latency import answer
from bench.worker_cost.overhead import LATENCY_S, occupancy, worker_cost

from demo.stack import RedisServer, eventually

PROGRAMS = Path(__file__).resolve().parent / "programs"
SLOTS = (64, 256)
#: warmq's own further sizes.
MORE_SLOTS = (16, 512, 1024)
GRACE_S = 120
HELD = "held"
#: A stream's groups belong to its key: its entries move, not the key.
MOVE_STREAM = """
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
  redis.call('XADD', KEYS[2], '*', unpack(entry[2]))
end
redis.call('DEL', KEYS[1])
"""
TITLE = "queues over a simulated engine, 200 ms mean latency (ceiling, idle: none)"
EXPECTED = {
    "written": "before the first run, from facts/celery-redis.md section 2; arq was not run there",
    "warmq_occupancy_512": 0.995,
    "celery_occupancy_64": 0.95,
    "celery_occupancy_256": 0.5,
    "celery_ceiling_per_s": 700,
    "celery_worker_us_per_request": 1600,
    "taskiq_occupancy_256": 0.87,
    "taskiq_ceiling_per_s": 1900,
    "taskiq_worker_us_per_request": 655,
}
BARS = {"warmq_occupancy_512": 0.99}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: repeats, seconds of backlog, requests for the ceiling, idle ones, and
    lines of our own file, which is submitted and collected by commands, start and all."""

    repeats: int
    backlog_s: float
    ceiling: int
    idle: int
    lines: int


FULL = Sizes(3, 2.5, 2500, 20, 100_000)
QUICK = Sizes(1, 2, 1000, 10, 10_000)


@dataclass(frozen=True, slots=True)
class Queue:
    """One of the others: its module, and its worker's command line for so many slots."""

    module: str
    environment: str | None
    #: The key that its worker reads.
    key: str
    worker: Callable[[int], list[str]]

    def python(self) -> Path:
        """Return the interpreter that has it."""
        if self.environment is None:
            return Path(sys.executable)
        return environment(self.environment, over_base=False)


QUEUES = {
    "celery": Queue("stock_celery", None, "celery", lambda slots: [
        "celery", "-A", "stock_celery", "worker", "--pool=threads", f"-c{slots}",
        "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=WARNING",
    ]),
    "taskiq": Queue("stock_taskiq", "taskiq", "taskiq", lambda slots: [
        "taskiq", "worker", "stock_taskiq:broker", "--workers=1", f"--max-async-tasks={slots}",
        f"--max-prefetch={slots}", "--ack-type=when_saved", "--log-level=WARNING",
    ]),
    "arq": Queue("stock_arq", "arq", "arq:queue", lambda _: ["arq", "stock_arq.WorkerSettings"]),
}  # fmt: skip


class Running:
    """A queue's worker over a Redis of its own."""

    def __init__(self, queue: Queue, folder: Path, slots: int, latency_s: float, count: int):
        self._queue, self._slots, self._count = queue, slots, count
        self._out = folder / "seen.json"
        self._log = folder / "worker.log"
        self._server = RedisServer(folder)
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("STOCK_")} | {
            "STOCK_REDIS_URL": self._server.url, "SLOTS_NUMBER": str(slots),
            "SLOTS_LATENCY_S": str(latency_s), "SLOTS_COUNT": str(count),
            "SLOTS_OUT": str(self._out), "PYTHONPATH": str(PROGRAMS),
        }  # fmt: skip
        self._python = queue.python()

    def __enter__(self) -> Running:
        self._server.start()
        command, *words = self._queue.worker(self._slots)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._python.parent / command, *words], cwd=PROGRAMS, env=self._env,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            self.client("idle", 1)  # it has answered one: it is ready
        except subprocess.SubprocessError as error:
            self.__exit__()
            raise CannotRun(told(self._log.read_text())) from error
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        self._server.stop()

    def client(self, what: str, count: int, told: object = None, **env: str) -> list[Any]:
        """Run the queue's client; return what it prints."""
        done = subprocess.run(
            [self._python, PROGRAMS / f"{self._queue.module}.py", what, str(count)],
            cwd=PROGRAMS, env=self._env | env, stdout=subprocess.PIPE, timeout=GRACE_S, check=True,
            input=json.dumps(told).encode(),
        )  # fmt: skip
        found: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def drain(self) -> dict[str, float]:
        """Release a queue that was filled before, wait for all results."""
        count = self._count - 1  # the one that showed that it is ready counts too
        submitting_s, keys = self.client("enqueue", count, STOCK_QUEUE=HELD)
        with self._server.client() as client:
            cpu, began = self._cpu_s(), time.monotonic()
            self._release(client)
            eventually(self._out.exists, GRACE_S, f"{count} requests: {self._log}", 0.01)
            calls = redis_calls(client)
            eventually(lambda: client.exists(*keys) == count, 30, "all results", 0.01)
            seconds = time.monotonic() - began
        collecting_s, answers = self.client("collect", count, keys)
        assert answers == count
        seen: dict[str, float] = json.loads(self._out.read_text())
        return seen | {
            "per_s": count / seconds,
            "submit_per_s": count / submitting_s,
            "results_per_s": count / collecting_s,
            "worker_us_per_request": 1e6 * (self._cpu_s() - cpu) / count,
            "commands_per_request": sum(calls.values()) / count,
        }

    def _release(self, client: redis.Redis) -> None:
        release = client.pipeline(transaction=True)
        if client.type(HELD) == b"stream":
            release.eval(MOVE_STREAM, 2, HELD, self._queue.key)
        else:
            release.rename(HELD, self._queue.key)
        release.config_resetstat()
        release.execute()

    def _cpu_s(self) -> float:
        processes = psutil.Process(self._process.pid)
        return sum(cpu_s(it.pid) for it in (processes, *processes.children(recursive=True)))


def foreign(queue: Queue, folder: Path, sizes: Sizes) -> dict[str, float]:
    """Return one repeat's figures of one of the others."""
    found: dict[str, float] = {}
    for slots in SLOTS:
        count = int(slots / LATENCY_S * sizes.backlog_s)
        with Running(queue, folder / str(slots), slots, LATENCY_S, count) as running:
            seen = running.drain()
        found[f"occupancy_{slots}"] = seen["occupancy"]
    found["worker_us_per_request"] = seen["worker_us_per_request"]
    for figure in ("commands_per_request", "submit_per_s", "results_per_s"):
        found[figure] = seen[figure]
    with Running(queue, folder / "ceiling", 256, 0, sizes.ceiling) as running:
        found["ceiling_per_s"] = running.drain()["per_s"]
        times = running.client("idle", sizes.idle)
    for share, label in ((0.5, "p50"), (0.99, "p99")):
        found[f"idle_ms_{label}"] = report.percentile(times, share)
    return found


def ours(folder: Path, sizes: Sizes) -> dict[str, float]:
    """Return one repeat's figures of warmq."""
    found = {}
    for slots in (*SLOTS, *MORE_SLOTS):
        seen = occupancy(folder / str(slots), slots, sizes.backlog_s)
        found[f"occupancy_{slots}"] = seen["occupancy"]
    count = int(256 / LATENCY_S * sizes.backlog_s)
    cost = worker_cost(folder / "cost", 256, count, simulated_latency_s=LATENCY_S)
    found["worker_us_per_request"] = cost["worker_us_per_request"]
    found["commands_per_request"] = cost["commands_per_request"]
    found |= rates(folder / "rates", sizes.lines)
    zero = worker_cost(folder / "ceiling", 256, 5 * sizes.ceiling, simulated_latency_s=0)
    found["ceiling_per_s"] = zero["per_s"]
    times = answer(folder / "idle", sizes.idle)
    for share, label in ((0.5, "p50"), (0.99, "p99")):
        found[f"idle_ms_{label}"] = report.percentile(times, share)
    return found


def rates(folder: Path, lines: int) -> dict[str, float]:
    """Return lines/s of `producer submit` and of `producer results`."""
    folder.mkdir()
    path = folder / "in.jsonl"
    write_file(path, lines)
    submitted = submit(path, lines, folder / "submit")
    with finished(folder / "results", lines) as url:
        command = [str(PRODUCER), "results", COLLECTED, "-o", str(folder / "out.jsonl")]
        collecting_s = timed(command, url)["wall_s"]
    return {"submit_per_s": submitted["lines_per_s"], "results_per_s": lines / collecting_s}


def measure(quick: bool) -> dict[str, Any]:
    """Run all repeats, interleaved; return the part's figures."""
    sizes = QUICK if quick else FULL
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("warmq", *QUEUES)}
    not_run: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        for repeat in range(sizes.repeats):
            folder = Path(name) / str(repeat)
            runs["warmq"].append(ours(folder / "warmq", sizes))
            for key, queue in QUEUES.items():
                if key in not_run:
                    continue
                try:
                    runs[key].append(foreign(queue, folder / key, sizes))
                except (CannotRun, TimeoutError) as error:
                    not_run[key] = str(error)
                    print(f"{key} could not be measured: {error}", flush=True)
    digits = {"occupancy": 4, "ceiling": 0, "worker": 0, "commands": 1, "idle": 2,
              "submit": 0, "results": 0}  # fmt: skip
    return {
        "latency_s": LATENCY_S, "not_run": not_run,
        "versions": {
            key: version(queue.environment) for key, queue in QUEUES.items() if queue.environment
        },
        "reached": {
            f"{key}_{figure}": report.spread(
                [found[figure] for found in repeats], digits[figure.partition("_")[0]]
            )
            for key, repeats in runs.items() if repeats for figure in repeats[0]
        },
    }  # fmt: skip
