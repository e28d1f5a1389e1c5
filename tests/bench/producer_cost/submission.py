"""The producer's command line over a large file: lines per second and peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from bench.common import report
from bench.common.load import redis_cpu_s

from contract.openai.lines import parse_line
from demo.stack import RedisServer

#: About 0.5 KB of prompt, words so that compression or caching could not help.
WORDS = "queue engine model prompt answer token batch worker result lease letter number "
PRODUCER = Path(sys.executable).parent / "producer"
LOOK_S = 0.01
TITLE = "producer submit, whole command with its start; 0.5 KB prompts"
EXPECTED = {
    "written": "before the first run",
    "lines_per_s_100k": 55_000,
    "peak_mb_100k": 70,
    "lines_per_s_1m": 50_000,
    "peak_mb_1m": 95,
    "parse_line_us": 6,
    "why": "per line: parse and check 6 us, message 3 us, uuid 1 us, digest and ENQUEUE's reply "
    "in another thread; above 200,000 lines the ids seen go to SQLite",
}
#: Of rates without the 0.4 s that a command takes to start, or where it is a small part.
BARS = {
    "lines_per_s_100k_after_start": 80_000, "lines_per_s_1m": 80_000, "peak_mb_100k": 120,
    "peak_mb_1m": 120,
}  # fmt: skip


def write_file(path: Path, lines: int) -> None:
    """Write OpenAI batch lines with prompts of about 0.5 KB, each another."""
    text = (WORDS * 8)[:490]
    with path.open("wb") as file:
        for number in range(lines):
            file.write(orjson.dumps({
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": f"{number:09d} {text}", "max_tokens": 64},
            }) + b"\n")  # fmt: skip


def timed(
    command: list[str],
    redis_url: str,
    look: Callable[[int], object] = lambda pid: None,
    env: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Run a command; return its wall seconds, CPU seconds and peak memory in MB.

    `look` is called with its process id again and again while it runs; `env` is added to its
    environment. The peak is VmHWM, read
    until the process ends: ru_maxrss would count what this process had in memory when it forked.
    """
    whole = os.environ | {"WARMQ_REDIS_URL": redis_url} | dict(env or {})
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=whole, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    peak_kb = 0
    while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        peak_kb = max(peak_kb, peak_kb_of(process.pid))
        look(process.pid)
        time.sleep(LOOK_S)
    wall = time.monotonic() - began
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.stderr is not None
    text = process.stderr.read()
    if process.returncode != 0:
        raise RuntimeError(f"{command[1]} ended with {process.returncode}: {text}")
    return {"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": peak_kb / 1024}


def peak_kb_of(pid: int) -> int:
    """Return the kernel's high-water mark of a process' memory in KiB, 0 once it has ended."""
    with open(f"/proc/{pid}/status") as status:  # noqa: PTH123 - read in a loop
        for line in status:
            if line.startswith("VmHWM"):
                return int(line.split()[1])
    return 0


def submit(path: Path, lines: int, folder: Path, *redis_options: str) -> dict[str, Any]:
    """Submit a file to an empty Redis that no worker drains."""
    with RedisServer(folder, *redis_options) as server, server.client() as client:
        before = redis_cpu_s(client)
        found = timed([str(PRODUCER), "submit", str(path), "--batch-id", "bench"], server.url)
        return found | {
            "lines": lines,
            "lines_per_s": lines / found["wall_s"],
            "cpu_us_per_line": 1e6 * found["cpu_s"] / lines,
            "redis_us_per_line": 1e6 * (redis_cpu_s(client) - before) / lines,
            "redis_mb": client.info("memory")["used_memory"] / 2**20,
        }


def parse_line_us(path: Path, lines: int) -> float:
    """Return microseconds of parse_line alone for a line of the file."""
    with path.open("rb") as file:
        raws = [line for line, _ in zip(file, range(lines), strict=False)]
    began = time.perf_counter()
    for raw in raws:
        parse_line(raw)
    return 1e6 * (time.perf_counter() - began) / len(raws)


def measure(quick: bool) -> dict[str, Any]:
    """Run all repeats, interleaved; return the part's figures."""
    repeats, small, large = (2, 20_000, 0) if quick else (5, 100_000, 1_000_000)
    figures: dict[str, list[float]] = {}

    def keep(found: dict[str, Any], label: str) -> None:
        for name in ("lines_per_s", "peak_mb", "cpu_us_per_line", "redis_us_per_line"):
            figures.setdefault(f"{name}_{label}", []).append(found[name])

    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        folder = Path(name)
        path, one, big = (folder / f"{kind}.jsonl" for kind in ("small", "one", "big"))
        write_file(path, small)
        write_file(one, 1)
        for repeat in range(repeats):
            whole = submit(path, small, folder / f"r{repeat}")
            keep(whole, "100k")
            start = submit(one, 1, folder / f"o{repeat}")["wall_s"]
            figures.setdefault("start_s", []).append(start)
            steady = small / (whole["wall_s"] - start)
            figures.setdefault("lines_per_s_100k_after_start", []).append(steady)
            figures.setdefault("parse_line_us", []).append(parse_line_us(path, 20_000))
        if large:
            write_file(big, large)
            for repeat in range(2):
                # Without the append-only file: a million messages are 1.3 GB of it.
                keep(submit(big, large, folder / f"b{repeat}", "--appendonly", "no"), "1m")
    return {
        "lines": {"100k": small, "1m": large},
        "reached": {name: report.spread(values, 2) for name, values in figures.items()},
    }
