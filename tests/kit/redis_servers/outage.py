"""What tests of Redis outages need: a worker with work in flight, and what became of it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from celery import Celery
from kit.protocol.lessee import Submitted, chat, client_of, submit_batch
from kit.verdicts.settled import assert_batch_settled, assert_committed_once, assert_nothing_left

from contract.batch import Batch
from contract.errors import StoreUnavailable
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually

TTL_MS = 600_000
#: How much of one core a worker may use while Redis is away. An idle one uses about 2 %.
IDLE_CPU = 0.25


def store_of(server: RedisServer) -> BatchStore:
    """Return the producer's store in a server."""
    return BatchStore(server.client(), ttl_ms=TTL_MS)


def simulated(url: str, folder: Path, name: str = "worker", **settings: object) -> Worker:
    """Return a worker with the simulated engine and its append-only log; `name` names its own."""
    defaults: dict[str, object] = {
        "engine": "simulated",
        "simulated_slots": 256,
        "simulated_latency_s": 0.2,
        "simulated_log": folder / "engine.log",
        "look_ahead": 0,
        "lease_s": 6,
        "drain_timeout_s": 10,
    }
    return Worker(url, folder / f"{name}.log", **(defaults | settings))


def sleepers(seconds: Sequence[float]) -> list[dict[str, Any]]:
    """Return one body for each latency, all different."""
    return [chat(f"sleeper {n}", user=f"simulate:sleep={s}") for n, s in enumerate(seconds)]


def spread(count: int, first_s: float, last_s: float) -> list[float]:
    """Return latencies from first to last."""
    return [round(first_s + (last_s - first_s) * n / max(1, count - 1), 3) for n in range(count)]


def starts(folder: Path) -> Counter[str]:
    """Return how often the engine began each request, from its own log."""
    log = folder / "engine.log"
    if not log.exists():
        return Counter()
    words = (line.split() for line in log.read_text().splitlines())
    return Counter(word[1] for word in words if word[0] == "start")


def recomputed(folder: Path) -> int:
    """Return how many computations were begun more than needed."""
    counts = starts(folder)
    return sum(counts.values()) - len(counts)


def in_flight(folder: Path, count: int, timeout_s: float = 30) -> None:
    """Wait until the engine has begun so many requests."""
    eventually(lambda: len(starts(folder)) >= count, timeout_s, f"{count} requests begun")


def finished(store: BatchStore, batch_id: str, timeout_s: float = 60) -> Batch:
    """Wait for a batch's end. Redis may be away meanwhile."""

    def look() -> Batch | None:
        try:
            batch = store.batch(batch_id)
        except StoreUnavailable:
            return None
        return batch if batch is not None and batch.finished else None

    batch = eventually(look, timeout_s, f"{batch_id} is finished")
    assert batch is not None
    return batch


def assert_settled(
    store: BatchStore, submitted: Submitted, bodies: Sequence[dict[str, Any]]
) -> None:
    """The common verdict; where Redis keeps its append-only file whole, by that record too."""
    asked = {f"c{line}": body for line, body in enumerate(bodies, 1)}
    assert_batch_settled(store, submitted.id, asked)
    assert_nothing_left(store, 15)
    if (folder := _whole_record(store)) is not None:
        assert_committed_once(folder, asked, submitted.id)


def _whole_record(store: BatchStore) -> Path | None:
    """Return the folder of an append-only file that was never written anew."""
    kept: dict[str, str] = client_of(store).config_get("*")
    info: dict[str, Any] = client_of(store).info("persistence")
    if kept["appendonly"] != "yes" or info["aof_base_size"] > 10_000:
        return None
    return Path(kept["dir"])


def submit_sleepers(
    store: BatchStore, seconds: Sequence[float], batch_id: str = "b1"
) -> tuple[Submitted, list[dict[str, Any]]]:
    """Queue one request for each latency."""
    bodies = sleepers(seconds)
    return submit_batch(store, batch_id=batch_id, bodies=bodies), bodies


@contextmanager
def neither_hung_nor_spinning(worker: Worker) -> Iterator[None]:
    """The worker lives on through the block, uses little CPU, and its log says what is wrong."""
    assert worker.process is not None
    process = psutil.Process(worker.process.pid)
    before, size = process.cpu_times(), worker.log_path.stat().st_size
    took = _Stopwatch()
    yield
    seconds, after = took.seconds(), process.cpu_times()
    used = after.user + after.system - before.user - before.system
    assert worker.process.poll() is None, "the worker ended"
    said = worker.log_path.read_bytes()[size:]
    assert said.strip(), "the worker said nothing about it"
    assert len(said.splitlines()) < 100 + 50 * seconds, "the worker fills its log"
    assert used < 0.5 + IDLE_CPU * seconds, f"{used:.2f} s of CPU in {seconds:.1f} s"


class _Stopwatch:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def seconds(self) -> float:
        return float(time.monotonic() - self._began)


def stay(seconds: float) -> None:
    """Let a fault last: its length is part of the test, nothing is waited for."""
    threading.Event().wait(seconds)


def inspect(url: str, method: str = "stats", timeout_s: float = 20, **conf: Any) -> dict[str, Any]:
    """Ask the one worker through Celery's own control command, until it answers."""
    app = Celery("client", broker=url, backend=url)
    app.conf.update(conf)
    try:
        replies = eventually(
            getattr(app.control.inspect(timeout=1.0, limit=1), method),
            timeout_s,
            f"inspect {method}",
        )
    finally:
        app.close()
    (answer,) = replies.values()
    return answer if isinstance(answer, dict) else {"answer": answer}


def celery_inspect(
    env: dict[str, str], *words: str, of: Worker | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `celery -A worker.app inspect ...`, the operator's own command.

    Asked for one worker, by its name, it ends with that one's answer; else with its --timeout.
    """
    celery = Path(sys.executable).parent / "celery"
    if of is not None:
        shown = re.compile(r"worker +(w\d+@\S+), process")
        found = eventually(lambda: shown.search(of.log_path.read_text()), 20, "its name")
        words = (*words, "--destination", found[1])
    return subprocess.run(
        [celery, "-A", "worker.app", "inspect", *words], env=env, capture_output=True,
        text=True, timeout=50, check=False,
    )  # fmt: skip
