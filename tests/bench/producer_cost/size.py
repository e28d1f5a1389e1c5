"""A million lines through submit, worker and results: seconds, and memory as they go.

Then a large file through `producer run`, killed half-way and gone on with: Redis holds two
windows of it. One worker process with the simulated engine serves all; Redis without its
append-only file, which would be 2 GB.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import redis
from bench.common import report
from bench.common.footprint import Footprint
from bench.common.load import TTL_MS, wait_ready
from bench.producer_cost.submission import PRODUCER, peak_kb_of, timed, write_file
from kit.commands.support import producer_env
from kit.stacks.memory import growth

from contract import naming
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker

BATCH = "size"
WINDOW = 20_000
TITLE = "1,000,000 lines of 0.5 KB through submit, worker and results; one run"
EXPECTED = {
    "written": "before the first run, from the other parts' figures",
    "submit_s": 18, "drain_s": 90, "collect_s": 11,
    "bytes_to_message": 1.04,
    "producer_mb": 85, "collector_mb": 80, "worker_mb": 90,
    "worker_mb_per_100k": 0.2, "worker_growth": 0.02,
    "submit_mb_per_100k": 0.5, "collect_mb_per_100k": 1,
    "window_redis_mb": 55, "window_peak_growth": 1.0,
    "why": "nothing keeps more than a window or a chunk of requests; the ids seen go to SQLite "
    "above 200,000; collecting a list of index chunks is the one thing that may grow",
}  # fmt: skip
BARS = {
    "producer_mb": 120,
    "worker_growth": 0.05,
    "bytes_to_message": 1.3,
    "window_peak_growth": 1.05,
}


@dataclass(frozen=True, slots=True)
class Stage:
    """Where it all happens: a Redis that was empty, a folder for files."""

    server: RedisServer
    client: redis.Redis
    store: BatchStore
    folder: Path

    def number(self, name: str) -> int:
        """Return a counter of the large batch, 0 before there is one."""
        batch = self.store.batch(BATCH)
        return batch.number(name) if batch else 0

    def command(self, look: Callable[[int], object], *words: str | Path) -> dict[str, float]:
        """Run a `producer` command to its end."""
        return timed([str(PRODUCER), *map(str, words)], self.server.url, look)


def submit(stage: Stage, path: Path, lines: int) -> dict[str, Any]:
    """Queue the file before there is a worker; return seconds, memory, bytes a request."""
    before = stage.client.info("memory")["used_memory"]
    trace = Footprint(stage.client, lambda: stage.number("cursor"))
    found = stage.command(lambda pid: trace.look(producer=pid), "submit", path, "--batch-id", BATCH)
    spent = trace.spent()
    took = stage.client.info("memory")["used_memory"] - before
    messages, waiting = _message_bytes(stage.client)
    if waiting != lines:
        raise RuntimeError(f"{waiting} of {lines} requests wait")
    return found | {
        "redis_us_per_request": 1e6 * spent["redis_s"] / lines,
        "redis_bytes_per_request": took / lines,
        "message_bytes": messages / lines,
        "bytes_to_message": took / messages,
        "mb_per_100k": trace.slope("producer", lines // 4),
        "trace": trace.columns(),
    }


def _message_bytes(client: redis.Redis) -> tuple[int, int]:
    """Return the bytes of all queued messages, and how many they are."""
    total = count = 0
    for key in BatchStore(client, ttl_ms=0).queue_lengths(naming.DEFAULT_QUEUE):
        for start in range(0, client.llen(key), 5000):
            messages = client.lrange(key, start, start + 4999)
            total, count = total + sum(map(len, messages)), count + len(messages)
    return total, count


def drain(stage: Stage, worker: Worker, lines: int) -> dict[str, Any]:
    """Follow a worker that has just become ready to the end; return seconds and memory."""
    trace = Footprint(stage.client, lambda: stage.number("completed"))
    while trace.look(worker=worker.pid) < lines:
        if worker.process is None or worker.process.poll() is not None:
            raise RuntimeError("the worker has ended")
        time.sleep(0.02)
    spent = trace.spent()
    return {
        "wall_s": spent["seconds"],
        "redis_us_per_request": 1e6 * spent["redis_s"] / lines,
        "peak_mb": peak_kb_of(worker.pid) / 1024,
        "redis_peak_mb": stage.client.info("memory")["used_memory_peak"] / 2**20,
        "mb_per_100k": trace.slope("worker", lines // 10),
        "growth": growth(list(zip(trace.done, trace.mb["worker"], strict=True)), lines // 100),
        "redis_mb_per_100k": trace.slope("redis", lines // 10),
        "trace": trace.columns(),
    }


def collect(stage: Stage, lines: int) -> dict[str, Any]:
    """Collect in input order, delete the batch; return seconds and memory."""
    folder = stage.folder / "out"
    folder.mkdir()
    out = folder / "out.jsonl"
    # It is written under another name beside its place; lines are as good as equally long.
    trace = Footprint(stage.client, lambda: sum(p.stat().st_size for p in folder.iterdir()))
    found = stage.command(lambda pid: trace.look(producer=pid), "results", BATCH, "-o", out)
    spent = trace.spent()
    size = out.stat().st_size
    trace.done = [bytes_ * lines // size for bytes_ in trace.done]
    check_order(out, lines)
    out.unlink()
    deleted = stage.command(lambda pid: None, "delete", BATCH)
    return found | {
        "redis_us_per_request": 1e6 * spent["redis_s"] / lines,
        "mb_per_100k": trace.slope("producer", lines // 10),
        "trace": trace.columns(),
        "delete_s": deleted["wall_s"],
        "redis_mb_after_delete": stage.client.info("memory")["used_memory"] / 2**20,
    }


def check_order(out: Path, lines: int) -> None:
    """Raise unless the output has every custom_id once, in the order of the input."""
    number = -1
    with out.open("rb") as file:
        for number, line in enumerate(file):
            if (found := orjson.loads(line)["custom_id"]) != f"request-{number}":
                raise RuntimeError(f"line {number} of the output is {found}")
    if number + 1 != lines:
        raise RuntimeError(f"{number + 1} of {lines} lines")


def windowed(
    client: redis.Redis, redis_url: str, path: Path, lines: int, window: int
) -> dict[str, Any]:
    """Take a file through in windows, kill -9 half-way, go on; return Redis' memory."""
    out = path.with_name("windows.jsonl")
    command = [str(PRODUCER), "run", str(path), str(out), "--window", str(window)]
    done = _Lines(out)
    trace = Footprint(client, done)
    with _started(command, redis_url) as process:
        while trace.look(producer=process.pid) < lines // 2 and process.poll() is None:
            time.sleep(0.02)
        process.kill()
    killed_at = done()
    peak = 0
    with _started(command, redis_url) as process:
        while process.poll() is None:
            trace.look(producer=process.pid)
            peak = max(peak, peak_kb_of(process.pid))
            time.sleep(0.02)
    if process.returncode != 0:
        raise RuntimeError(f"`producer run` ended with {process.returncode}")
    check_order(out, lines)
    halves: tuple[list[float], list[float]] = ([], [])
    for count, mb in zip(trace.done, trace.mb["redis"], strict=True):
        halves[count >= lines // 2].append(mb)
    return {
        "lines": lines,
        "window": window,
        "killed_at": killed_at,
        "wall_s": trace.spent()["seconds"],
        "peak_mb": peak / 1024,
        "redis_mb": max(trace.mb["redis"]),
        "peak_growth": max(halves[1]) / max(halves[0]),
        "redis_mb_per_100k": trace.slope("redis", 2 * window),
        "trace": trace.columns(),
    }


class _Lines:
    """Counts the lines of a growing file; each part of it is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = self._count = 0

    def __call__(self) -> int:
        if not self._path.exists():
            return 0
        if self._path.stat().st_size < self._at:  # cut back after a kill
            self._at = self._count = 0
        with self._path.open("rb") as file:
            file.seek(self._at)
            while part := file.read(2**20):
                self._at, self._count = self._at + len(part), self._count + part.count(b"\n")
        return self._count


def _started(command: list[str], redis_url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=producer_env(redis_url), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def measure(quick: bool) -> dict[str, Any]:
    """Run all phases once; return the part's figures."""
    lines, in_windows, window = (20_000, 10_000, 1_000) if quick else (1_000_000, 300_000, WINDOW)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        folder = Path(name)
        path, part = folder / "in.jsonl", folder / "part.jsonl"
        write_file(path, lines)
        write_file(part, in_windows)
        with (
            RedisServer(folder / "redis", "--appendonly", "no") as server,
            server.client() as client,
        ):
            stage = Stage(server, client, BatchStore(client, ttl_ms=TTL_MS), folder)
            found["submit"] = submit(stage, path, lines)
            with Worker(
                server.url, folder / "worker.log", engine="simulated", simulated_slots=256,
                simulated_latency_s=0,
            ) as worker:  # fmt: skip
                wait_ready(client)
                found["drain"] = drain(stage, worker, lines)
                found["collect"] = collect(stage, lines)
                found["window"] = windowed(client, server.url, part, in_windows, window)
    return {
        "lines": lines,
        "reached": _reached(found),
        "phases": found,
    }


#: The figures of a phase that are shown: their names there and in the tables.
SHOWN = {
    "submit": {"wall_s": "submit_s", "peak_mb": "producer_mb", "mb_per_100k": "submit_mb_per_100k",
               "redis_us_per_request": "submit_redis_us", "bytes_to_message": "bytes_to_message",
               "redis_bytes_per_request": "redis_bytes", "message_bytes": "message_bytes"},
    "drain": {"wall_s": "drain_s", "peak_mb": "worker_mb", "mb_per_100k": "worker_mb_per_100k",
              "growth": "worker_growth",
              "redis_us_per_request": "drain_redis_us", "redis_peak_mb": "redis_mb",
              "redis_mb_per_100k": "redis_mb_per_100k"},
    "collect": {"wall_s": "collect_s", "peak_mb": "collector_mb",
                "mb_per_100k": "collect_mb_per_100k", "redis_us_per_request": "collect_redis_us",
                "delete_s": "delete_s", "redis_mb_after_delete": "redis_mb_after_delete"},
    "window": {"wall_s": "window_s", "peak_mb": "window_producer_mb",
               "redis_mb": "window_redis_mb", "peak_growth": "window_peak_growth",
               "redis_mb_per_100k": "window_redis_mb_per_100k"},
}  # fmt: skip


def _reached(found: dict[str, Any]) -> dict[str, Any]:
    return {
        shown: report.spread([found[phase][name]], 3)
        for phase, names in SHOWN.items()
        for name, shown in names.items()
    }
