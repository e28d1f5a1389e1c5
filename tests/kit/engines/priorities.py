"""Requests of several priorities in an engine with little KV cache:
`python tests/kit/engines/priorities.py`.

First each line runs with at most one other, so that none is preempted. Then all lines of the batch
run together, and the online ones come while they run. The report has the texts of both times, the
order of the ends, and how often vLLM preempted a request.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kit.engines.conformance import until

from demo.stack import CPU_ENGINE_ARGS, MODEL, ROOT, environment_of
from worker.engine import EngineRequest
from worker.engine.catalogue import load_settings, make_engine

Line = tuple[str, dict[str, Any]]
#: Eight slots, and KV cache for four answers of 160 tokens.
NARROW = "--max-num-seqs 8 --max-model-len 512 --block-size 32 --num-gpu-blocks-override 24"
BATCH, ONLINE = 6, 0


class Scene:
    """One engine; `preempted` counts vLLM's preemptions."""

    def __init__(self) -> None:
        self.engine: Any = make_engine(load_settings())
        self.preempted = 0
        self.ended: list[str] = []
        record = self.engine._progress.record

        def count(scheduler_stats: Any = None, stats: Any = None, *rest: Any, **more: Any) -> None:
            self.preempted += getattr(stats, "num_preempted_reqs", 0)
            record(scheduler_stats, stats, *rest, **more)

        self.engine._progress.record = count

    async def answer(self, name: str, line: Line, priority: int) -> list[str]:
        """Return the texts of an answer."""
        request = EngineRequest(*line, priority=priority)
        found = await self.engine.generate(request, f"id-{name}-{len(self.ended)}")
        self.ended.append(name)
        choices = json.loads(found.body)["choices"]
        return [one["message"]["content"] if "message" in one else one["text"] for one in choices]


async def run(batch: dict[str, Line], online: dict[str, Line]) -> dict[str, Any]:
    """Return the report."""
    scene = Scene()
    await asyncio.to_thread(scene.engine.build)
    await scene.engine.start()
    priorities = dict.fromkeys(batch, BATCH) | dict.fromkeys(online, ONLINE)
    alone: dict[str, list[str]] = {}
    two = asyncio.Semaphore(2)

    async def answer_alone(name: str, line: Line) -> None:
        async with two:
            alone[name] = await scene.answer(name, line, priorities[name])

    await asyncio.gather(*(answer_alone(*one) for one in (batch | online).items()))
    preempted_alone, scene.preempted = scene.preempted, 0
    scene.ended.clear()

    async def come(lines: dict[str, Line]) -> list[asyncio.Task[list[str]]]:
        return [
            asyncio.create_task(scene.answer(name, line, priorities[name]))
            for name, line in lines.items()
        ]

    tasks = await come(batch)
    name = f"id-{next(iter(batch))}-0"
    await until(lambda: "".join(scene.engine.text_so_far(name)), "the batch runs")
    tasks += await come(online)
    texts = await asyncio.gather(*tasks)
    fast = scene.engine._fast
    await asyncio.to_thread(scene.engine.shutdown)
    return {
        "alone": alone,
        "together": dict(zip([*batch, *online], texts, strict=True)),
        "ended": scene.ended,
        "preempted": scene.preempted,
        "preempted_alone": preempted_alone,
        "fast_forms": sum(form is not None for form in fast._forms.values()),
    }


def run_in_process(folder: Path, batch: dict[str, Line], online: dict[str, Line]) -> dict[str, Any]:
    """Return the report of a separate process."""
    source, out = folder / "lines.json", folder / "report.json"
    source.write_text(json.dumps([batch, online]))
    args = f"{CPU_ENGINE_ARGS} {NARROW}"
    env = environment_of({"engine": "vllm", "model": MODEL, "engine_args": args})
    env["VLLM_LOG_STATS_INTERVAL"] = "1000"  # with it vLLM counts preemptions
    done = subprocess.run(
        [sys.executable, __file__, source, out],
        cwd=ROOT, env=env, capture_output=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def _read(path: Path) -> list[dict[str, Line]]:
    return [
        {name: (url, body) for name, (url, body) in lines.items()}
        for lines in json.loads(path.read_text())
    ]


if __name__ == "__main__":
    batch_lines, online_lines = _read(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(run(batch_lines, online_lines))))
