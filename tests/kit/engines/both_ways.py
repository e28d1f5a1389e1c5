"""Requests by vLLM's serving classes and by the lean path: `python tests/kit/engines/both_ways.py`.

One engine in this process answers all of them the full way, then leanly where it can, all at once.
The report has, by name, both answers, or the errors in their place, and whether it went leanly.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kit.engines.conformance import until

from contract.errors import WarmqError
from demo.stack import CPU_ENGINE_ARGS, MODEL, ROOT, environment_of
from worker.engine import EngineRequest
from worker.engine.catalogue import load_settings, make_engine

Line = tuple[str, dict[str, Any]]


async def answer(engine: Any, name: str, line: Line) -> dict[str, Any]:
    """Return an answer's body with its token counts, or the error."""
    try:
        found = await engine.generate(EngineRequest(*line), f"id-{name}")
    except WarmqError as error:
        return {"error": str(error), "code": error.code, "field": getattr(error, "field", None)}
    return {
        "body": json.loads(found.body) | {"created": None},
        "tokens": [found.prompt_tokens, found.completion_tokens],
    }


async def together(engine: Any, lines: dict[str, Line]) -> dict[str, dict[str, Any]]:
    """Ask all at once, and return what each got."""
    found = await asyncio.gather(*(answer(engine, *one) for one in lines.items()))
    return dict(zip(lines, found, strict=True))


async def both(lines: dict[str, Line]) -> dict[str, Any]:
    """Return the report."""
    engine: Any = make_engine(load_settings())
    await asyncio.to_thread(engine.build)
    await engine.start()
    lean, engine._fast = engine._fast, None
    full = await together(engine, lines)
    engine._fast = lean
    went: set[str] = set()
    generate = lean.generate

    async def noting(body: dict[str, Any], request_id: str, key: bytes) -> Any:
        found: Any = "an error"
        try:
            found = await generate(body, request_id, key)
        finally:
            if found is not None:
                went.add(request_id.removeprefix("id-"))
        return found

    lean.generate = noting
    for one in [*lines.items(), *lines.items()]:  # a form is learned when it comes again
        if (key := lean.key_of(*one[1])) is not None and key not in lean._forms:
            await answer(engine, *one)
    leanly = await together(engine, lines)
    # Sums are rounded otherwise in other company: what differs is asked again, each alone.
    for name in [name for name in lines if full[name] != leanly[name]]:
        engine._fast = None
        full[name] = await answer(engine, name, lines[name])
        engine._fast = lean
        leanly[name] = await answer(engine, name, lines[name])
    left = len(engine._engine.output_processor.request_states)
    pools = "/v1/score" in engine._serving
    ends = await asyncio.wait_for((pooling_ended if pools else ended)(engine, went), 200)
    await asyncio.to_thread(engine.shutdown)
    return {
        "left": left,
        "ends": ends,
        "answers": {
            name: {"full": full[name], "lean": leanly[name], "leanly": name in went}
            for name in lines
        },
    }


async def ended(engine: Any, went: set[str]) -> dict[str, Any]:
    """Return how lean requests end that are read, given up, or in an engine that is killed."""
    states = engine._engine.output_processor.request_states
    line = "/v1/completions", {"prompt": "2 + 3 =", "max_tokens": 900, "ignore_eos": True}
    for name in ("once", "twice"):
        await answer(engine, name, line)

    async def begun(name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(engine.generate(EngineRequest(*line), f"id-{name}"))
        await until(lambda: "".join(engine.text_so_far(f"id-{name}")), "it has text")
        return task

    task = await begun("given up")
    read = engine.text_so_far("id-given up")
    task.cancel()
    (given_up,) = await asyncio.gather(task, return_exceptions=True)
    left = len(states)
    task = await begun("killed")
    await asyncio.to_thread(engine.kill)
    (killed,) = await asyncio.gather(task, return_exceptions=True)
    return {
        "read": read, "given_up": type(given_up).__name__, "left": left,
        "killed": type(killed).__name__, "inside": getattr(killed, "inside", None),
        "leanly": sorted(went & {"once", "twice", "given up", "killed"}),
    }  # fmt: skip


async def pooling_ended(engine: Any, went: set[str]) -> dict[str, Any]:
    """The same of a pooling model, whose process is stopped so that they are surely in it."""
    states = engine._engine.output_processor.request_states
    lines: dict[str, Line] = {"score": ("/v1/score", {"text_1": "2 + 3 =", "text_2": "5"})}
    embeds = "/v1/embeddings" in engine._serving
    if embeds:
        lines["embedding"] = "/v1/embeddings", {"input": "2 + 3 ="}
    for name, line in [*lines.items(), *lines.items()]:
        await answer(engine, name, line)
    before = set(went)
    for process in multiprocessing.active_children():
        os.kill(process.pid or 0, signal.SIGSTOP)

    async def begun(word: str) -> list[asyncio.Task[Any]]:
        asked = [EngineRequest(*line) for line in lines.values()]
        tasks = [
            asyncio.create_task(engine.generate(one, f"id-{word} {name}"))
            for one, name in zip(asked, lines, strict=True)
        ]
        # A score is of two embeddings, where there are any.
        await until(lambda: len(states) == (3 if embeds else 1), "all are in the engine")
        return tasks

    tasks = await begun("given up")
    read = [engine.text_so_far(f"id-given up {name}") for name in lines]
    for task in tasks:
        task.cancel()
    given_up = await asyncio.gather(*tasks, return_exceptions=True)
    left = len(states)
    tasks = await begun("killed")
    await asyncio.to_thread(engine.kill)
    killed = await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "read": read, "given_up": [type(one).__name__ for one in given_up], "left": left,
        "killed": [type(one).__name__ for one in killed],
        "inside": [getattr(one, "inside", None) for one in killed],
        "leanly": sorted(went - before),
    }  # fmt: skip


def answered_both_ways(
    folder: Path, lines: dict[str, Line], words: str, model: Path = MODEL
) -> dict[str, Any]:
    """Return the report of a process of its own; `words` are options of its engine more."""
    source, out = folder / "lines.json", folder / "report.json"
    source.write_text(json.dumps(lines))
    settings = {"engine": "vllm", "model": model, "engine_args": f"{CPU_ENGINE_ARGS} {words}"}
    clean = environment_of(settings)
    done = subprocess.run(
        [sys.executable, __file__, source, out],
        cwd=ROOT, env=clean, capture_output=True, timeout=560, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
    report: dict[str, Any] = json.loads(out.read_text())
    return report


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    report = asyncio.run(
        both({k: (url, body) for k, (url, body) in json.loads(source.read_text()).items()})
    )
    out.write_text(json.dumps(report))
