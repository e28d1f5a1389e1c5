"""Instructions per line and per request, by callgrind: counts that no other load changes.

Each program runs twice under `valgrind --tool=callgrind`, with few and with many lines; the
difference of the two is free of the start. valgrind has no SHA instructions, so hashing counts for
more here than it costs. Needs valgrind, which nothing else here does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.load import hold
from bench.producer_cost.collection import COLLECTED, finished
from bench.producer_cost.submission import PRODUCER, write_file

from demo.stack import RedisServer, eventually

FEW, MANY = 2_000, 8_000
#: Functions shown of each program.
TOP = 12
PROBE = Path(__file__).resolve().parents[1] / "common" / "probe.py"
EXPECTED = {
    "written": "before the first run, from the microseconds of part submit, at 3 a nanosecond",
    "submit": 30_000,
    "results": 20_000,
    "drain": 300_000,
}
_LINE = re.compile(r"^\s*([\d,]+) \([^)]*\)\s+(?:.*?[:/])?([\w.'@$<>]+)(?: \[(.*)\])?$")


def command(out: Path, words: Sequence[object]) -> list[str]:
    """Return a Python program's command line under callgrind."""
    tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--quiet"]
    return [*tool, sys.executable, *map(str, words)]


def functions(out: Path) -> Counter[str]:
    """Return instructions by function; the sum is under ''."""
    text = subprocess.run(
        ["callgrind_annotate", "--threshold=100", "--auto=no", str(out)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if "PROGRAM TOTALS" in line:
            found[""] = int(line.split()[0].replace(",", ""))
        elif parts := _LINE.match(line):
            library = Path(parts[3] or "").name.partition(".")[0]
            found[f"{library} {parts[2].partition(chr(39))[0]}"] += int(parts[1].replace(",", ""))
    return found


def submitted(folder: Path, lines: int) -> Path:
    """Submit a file; return callgrind's."""
    path, out = folder / "in.jsonl", folder / "callgrind"
    write_file(path, lines)
    with RedisServer(folder / "redis") as server:
        count(out, server.url, [PRODUCER, "submit", path, "--batch-id", "b"])
    return out


def collected(folder: Path, lines: int) -> Path:
    """Collect a finished batch; return callgrind's file."""
    out = folder / "callgrind"
    with finished(folder, lines) as url:
        count(out, url, [PRODUCER, "results", COLLECTED, "-o", folder / "out.jsonl"])
    return out


def drained(folder: Path, lines: int) -> Path:
    """Drain a batch with 256 simulated slots; return callgrind's file."""
    out = folder / "callgrind"
    with RedisServer(folder / "redis") as server, server.client() as client:
        held = hold(client, "drain", lines)
        held.release()
        env = {"WARMQ_ENGINE": "simulated", "WARMQ_SIMULATED_SLOTS": "256"}
        process = start(out, server.url, [PROBE, folder / "seen.json", 7], **env)
        held.wait(300)
        process.terminate()
        if process.wait(60):
            raise RuntimeError(f"the drain ended with {process.returncode}")
    return out


def start(out: Path, url: str, words: Sequence[object], **env: str) -> subprocess.Popen[bytes]:
    """Start a program under callgrind, with the same hashes each time."""
    env = os.environ | {"WARMQ_REDIS_URL": url, "PYTHONHASHSEED": "0"} | env
    return subprocess.Popen(command(out, words), env=env, stdout=subprocess.DEVNULL)


def count(out: Path, url: str, words: Sequence[object]) -> None:
    """Run a program under callgrind."""
    if status := start(out, url, words).wait(600):
        raise RuntimeError(f"{words[1]} ended with {status}")
    eventually(out.exists, 10, str(out))


PROGRAMS: dict[str, Callable[[Path, int], Path]] = {
    "submit": submitted, "results": collected, "drain": drained,
}  # fmt: skip


def per_line(name: str, folder: Path) -> dict[str, Any]:
    """Return a program's instructions per line, and the functions that have most of them."""
    counts = []
    for lines in (FEW, MANY):
        place = folder / f"{name}-{lines}"
        place.mkdir()
        counts.append(functions(PROGRAMS[name](place, lines)))
    few, many = counts
    more = {function: (many[function] - few[function]) / (MANY - FEW) for function in many}
    total = more.pop("")
    top = sorted(more.items(), key=lambda entry: -entry[1])[:TOP]
    return {
        "instructions": round(total),
        "top": [{"function": name, "share": round(count / total, 3)} for name, count in top],
    }


def measure(_: bool = False) -> dict[str, Any]:
    """Count each program; return the part's figures. There is no quicker way."""
    if shutil.which("valgrind") is None:
        print("not counted: install valgrind", file=sys.stderr)
        sys.exit(0)
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        found = {program: per_line(program, Path(name)) for program in PROGRAMS}
    return {"lines": [FEW, MANY], "counted": found}


def show(data: dict[str, Any]) -> None:
    """Print each program's instructions."""
    report.table(
        f"instructions for each line or request, {MANY:,} less {FEW:,} of them",
        ("program", "expected", "counted", "most of them in"),
        [
            (program, f"{EXPECTED[program]:,}", f"{found['instructions']:,}",
             ", ".join(f"{top['function']} {top['share']:.0%}" for top in found["top"][:6]))
            for program, found in data["counted"].items()
        ],
    )  # fmt: skip
