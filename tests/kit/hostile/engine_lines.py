"""Hostile requests in one real engine: `python tests/kit/hostile/engine_lines.py LINES REPORT`.

The report has of each: how it ended, how long it took, the longest pause of the event loop, and how
long a small chat took that was sent at the same time; and what this process' memory has grown by.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from contract.errors import WarmqError
from demo.stack import CPU_ENGINE_ARGS, MODEL, ROOT, environment_of
from worker.engine import EngineRequest
from worker.engine.catalogue import load_settings, make_engine

Line = tuple[str, dict[str, Any]]
CHAT = "/v1/chat/completions"


def small(number: int) -> Line:
    """Return a chat that goes the full way, as a form that comes for the first time does."""
    return CHAT, {"messages": [{"role": "user", "content": "2 + 3 ="}], "max_tokens": 4,
                  "temperature": 0, "seed": number}  # fmt: skip


async def answered(engine: Any, name: str, line: Line) -> dict[str, Any]:
    """Return how a request ended, and after how many seconds."""
    began = time.monotonic()
    try:
        found = await engine.generate(EngineRequest(*line), f"id-{name}")
        ending: dict[str, Any] = {"kind": "answer", "body": json.loads(found.body)}
    except WarmqError as error:
        ending = {"kind": type(error).__name__, "message": str(error), "code": error.code}
    return ending | {"took_s": time.monotonic() - began}


async def longest_pause(of: asyncio.Task[Any]) -> float:
    """Return the longest time between two turns of the loop until a task has ended."""
    longest, last = 0.0, time.monotonic()
    while not of.done():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


async def report(lines: dict[str, Line]) -> dict[str, Any]:
    """Return the report."""
    engine: Any = make_engine(load_settings())
    await asyncio.to_thread(engine.build)
    await engine.start()
    for n, schema in enumerate(({"type": "integer"}, None, None)):  # all that starts late
        more = {"structured_outputs": {"json": schema}} if schema else {}
        await answered(engine, f"first {n}", (CHAT, small(n)[1] | more))
    found = {}
    for number, (name, line) in enumerate(lines.items()):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        hostile = asyncio.create_task(answered(engine, name, line))
        other = asyncio.create_task(answered(engine, f"other {name}", small(1000 + number)))
        pause = await longest_pause(asyncio.ensure_future(asyncio.gather(hostile, other)))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
        found[name] = hostile.result() | {
            "pause_s": pause, "other": other.result(), "grown_mb": grown
        }  # fmt: skip
    await asyncio.to_thread(engine.shutdown)
    return found


def ended(folder: Path, lines: dict[str, Line], model: Path = MODEL) -> dict[str, Any]:
    """Return the report of a process of its own."""
    source, out = folder / "lines.json", folder / "report.json"
    source.write_text(json.dumps(lines))
    settings = {"engine": "vllm", "model": model, "engine_args": CPU_ENGINE_ARGS}
    clean = environment_of(settings)
    done = subprocess.run(
        [sys.executable, __file__, source, out],
        cwd=ROOT, env=clean, capture_output=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    found = asyncio.run(report({k: (u, b) for k, (u, b) in json.loads(source.read_text()).items()}))
    out.write_text(json.dumps(found))
