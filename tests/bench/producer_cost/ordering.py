"""What `producer submit --order prefix` adds to submit: time, CPU, peak memory."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import orjson
from bench.common import report
from bench.producer_cost.submission import PRODUCER, timed

from demo.stack import RedisServer

#: Lines of one document.
QUESTIONS = 4
TITLE = "producer submit --order prefix, lines of 2 kB"
EXPECTED = {
    "written": "before the first run of a million lines",
    "added_time": 0.3,
    "added_cpu": 0.3,
    "peak_mb_prefix": 190,
    "why": "per line: text and keys 5 us, spool 2 us, order 2 us; the second pass' ENQUEUEs, "
    "which submit otherwise overlaps with reading, take Redis 4 us a line",
}
BARS = {"added_time": 0.6, "peak_mb_prefix": 200}


def write_file(path: Path, lines: int) -> None:
    """Write chats of 2 kB, documents × questions, all first questions first."""
    draw = random.Random(1)
    texts = [bytes(draw.choices(b"abcdefghijklmnop ", k=1_800)).decode() for _ in range(500)]
    documents = max(1, lines // QUESTIONS)
    with path.open("wb") as file:
        for line in range(lines):
            question, number = divmod(line, documents)
            asked = f"{number:08d} {texts[number % 500]}\n\nquestion {question}: what of {line}?"
            file.write(orjson.dumps({
                "custom_id": f"request-{line}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "messages": [
                        {"role": "system", "content": "Answer in one word."},
                        {"role": "user", "content": asked},
                    ],
                    "max_tokens": 64,
                },
            }) + b"\n")  # fmt: skip


def submitted(path: Path, order: str, folder: Path) -> dict[str, float]:
    """Submit a file to an empty Redis; the spool is beside it."""
    with RedisServer(folder, "--appendonly", "no") as server:
        command = [str(PRODUCER), "submit", str(path), "--batch-id", "bench", "--order", order]
        return timed(command, server.url, env={"TMPDIR": str(path.parent)})


def measure(quick: bool) -> dict[str, Any]:
    """Run both orders in turns; return the part's figures."""
    lines, rounds = (50_000, 1) if quick else (1_000_000, 2)
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        folder = Path(name)
        write_file(folder / "in.jsonl", lines)
        for turn in range(rounds):
            pair = {}
            for order in ("input", "prefix"):
                pair[order] = submitted(folder / "in.jsonl", order, folder / f"{order}{turn}")
                figures.setdefault(f"peak_mb_{order}", []).append(pair[order]["peak_mb"])
                rate = lines / pair[order]["wall_s"]
                figures.setdefault(f"lines_per_s_{order}", []).append(rate)
            for figure, what in (("added_time", "wall_s"), ("added_cpu", "cpu_s")):
                ratio = pair["prefix"][what] / pair["input"][what]
                figures.setdefault(figure, []).append(ratio - 1)
    return {
        "lines": lines,
        "reached": {name: report.spread(values, 3) for name, values in figures.items()},
    }
