"""A file through `producer run` in windows, killed half-way: does Redis hold two windows of it?"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import orjson
import redis
from bench.common.footprint import Footprint
from bench.producer_cost.submission import PRODUCER, peak_kb_of
from kit.commands.support import producer_env


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
