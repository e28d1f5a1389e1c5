"""Requests by vLLM's serving classes and by the lean path: `python tests/kit/both_ways.py`.

One engine in this process answers all of them the full way, then leanly where it can, all at once.
The report has, by name, both answers, or the errors in their place, and whether it went leanly.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from conformance import until

from contract.errors import WarmqError
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


async def both(lines: dict[str, Line]) -> dict[str, Any]:
    """Return the report."""
    engine: Any = make_engine(load_settings())
    await asyncio.to_thread(engine.build)
    await engine.start()
    lean, engine._lean = engine._lean, None
    full = await asyncio.gather(*(answer(engine, *one) for one in lines.items()))
    engine._lean = lean
    went: set[str] = set()
    run = lean._run

    async def noting(plan: Any, tokens: Any, request_id: str) -> Any:
        went.add(request_id.removeprefix("id-"))
        return await run(plan, tokens, request_id)

    lean._run = noting
    for one in [*lines.items(), *lines.items()]:  # a form is learned when it comes again
        if (key := _key(one[1])) is not None and key not in lean._forms:
            await answer(engine, *one)
    leanly = await asyncio.gather(*(answer(engine, *one) for one in lines.items()))
    left = len(engine._engine.output_processor.request_states)
    ends = await asyncio.wait_for(ended(engine, went), 60)
    await asyncio.to_thread(engine.shutdown)
    return {
        "left": left,
        "ends": ends,
        "answers": {
            name: {"full": theirs, "lean": ours, "leanly": name in went}
            for name, theirs, ours in zip(lines, full, leanly, strict=True)
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


def _key(line: Line) -> bytes | None:
    from worker.engine.vllm.plans import key_of

    return key_of(*line)


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    report = asyncio.run(
        both({k: (url, body) for k, (url, body) in json.loads(source.read_text()).items()})
    )
    out.write_text(json.dumps(report))
