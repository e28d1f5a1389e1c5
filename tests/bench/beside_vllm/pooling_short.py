"""Embeddings and scores of short texts: requests a second and CPU a request, and where it goes.

Two engines, one of them in a process of its own; forms in turn, for embeddings and (`score_*`) for
scores of two texts by the same model:

offline     LLM.embed() or LLM.score(), all texts in one call
bare        AsyncLLM.encode(), as many in flight as the drain has
full, lean  the adapter through vLLM's serving classes, and past them
queue       from Redis through the lean path; queue_full: through the serving classes
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench.beside_vllm.forms import Forms, warm_engine
from bench.beside_vllm.where import Where, figures, looked_at, per_request
from bench.common import report
from bench.gpu import offline, workload
from bench.gpu.pairs import Peer

from demo.stack import CPU_ENGINE_ARGS, ROOT
from worker.engine import EngineRequest

REQUESTS = 1000
LETTERS = (32, 32)
#: The same for both engines.
ENGINE: dict[str, Any] = {
    "max_num_seqs": 256, "max_model_len": 1024, "max_num_batched_tokens": 8192,
    "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**28,
    "gpu_memory_utilization": 0.2, "enable_prefix_caching": False,
}  # fmt: skip
KINDS = ("offline", "bare", "full", "lean", "queue_full", "queue")
FORMS = (*KINDS, *(f"score_{kind}" for kind in KINDS))
RATIOS = (
    ("queue", "offline"), ("queue_full", "offline"), ("queue", "bare"), ("queue", "queue_full"),
    ("lean", "bare"), ("full", "bare"),
)  # fmt: skip
TITLE = "embeddings and scores of texts of 32 letters; ratios are of pairs"
EXPECTED = {
    "written": "before the first run",
    "queue_to_offline": 0.95,
    "queue_to_queue_full": 1.3,
    "lean_to_full_cpu": 0.45,
    "score_queue_to_score_offline": 0.95,
    "why": "of texts that are written the classes were half; here they render and write in threads",
}
BARS = {"queue_to_offline": 0.95, "score_queue_to_score_offline": 0.95}


class PoolingShort:
    """The forms over one warm engine and the process with the other."""

    def __init__(self, forms: Forms, peer: Peer, count: int) -> None:
        self._forms, self._peer, self._count = forms, peer, count
        self._adapter: Any = forms.drain.supervisor.engine
        self._wanted = workload.requests(count, (0, 0), LETTERS)

    async def time(self, form: str, where: Where | None = None) -> dict[str, Any]:
        """Run all requests one way; `where` is told of the loop meanwhile."""
        pooling = "score" if form.startswith("score_") else "embed"
        kind = form.removeprefix("score_")
        if kind == "offline":
            return {"form": form} | await self._offline(pooling)
        run = partial(self._direct, kind, pooling)
        if kind.startswith("queue"):
            held = await asyncio.to_thread(
                self._forms.held, self._count,
                lambda number: workload.body(self._wanted[number - 1], pooling),
                workload.url(pooling),
            )  # fmt: skip
            run = partial(self._forms.queued, held, completed=self._count)
        full = kind.endswith("full")
        return {"form": form} | await looked_at(
            self._adapter, run, self._count, full=full, where=where
        )

    async def _offline(self, pooling: str) -> dict[str, float]:
        found = await asyncio.to_thread(
            self._peer.ask, count=self._count, tokens=(0, 0), letters=LETTERS, pooling=pooling
        )
        return figures(found["seconds"], found["cpu_s"], self._count)

    async def _direct(self, kind: str, pooling: str) -> float:
        one = self._bare if kind == "bare" else self._through

        async def numbered(number: int, request_id: str) -> None:
            await one(self._wanted[number - 1][0], pooling, request_id)

        return await self._forms.direct(numbered, self._count)

    async def _bare(self, text: str, pooling: str, request_id: str) -> None:
        from vllm import PoolingParams

        async def encode(part: str, name: str) -> None:
            params = PoolingParams(task="embed")
            async for output in self._adapter._engine.encode(part, params, name):
                assert output.outputs.data.numel() > 1

        parts = workload.sides(text) if pooling == "score" else (text,)
        await asyncio.gather(*(encode(part, f"{request_id}-{n}") for n, part in enumerate(parts)))

    async def _through(self, text: str, pooling: str, request_id: str) -> None:
        body = workload.body((text, 0), pooling)
        await self._adapter.generate(EngineRequest(workload.url(pooling), body), request_id)

    async def learn(self) -> None:
        """Let each form of body be met twice, so that no run has to learn it."""
        for pooling in ("embed", "score"):
            for number in range(2):
                await self._through("abcd", pooling, f"learn-{pooling}-{number}")


def reached(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return paired ratios, rates and CPU by form."""
    found: dict[str, Any] = {}

    def note(over: str, base: str, figure: str, name: str = "") -> None:
        values = [turn[over][figure] / turn[base][figure] for turn in runs]
        found[f"{over}_to_{base}{name}"] = report.spread(values)

    for prefix in ("", "score_"):
        for over, base in RATIOS:
            note(prefix + over, prefix + base, "requests_per_s")
        note(f"{prefix}lean", f"{prefix}full", "cpu_us_per_request", "_cpu")
        note(f"{prefix}queue", f"{prefix}queue_full", "cpu_us_per_request", "_cpu")
    for form in FORMS:
        for figure in ("requests_per_s", "cpu_us_per_request"):
            found[f"{form}_{figure}"] = report.spread([t[form][figure] for t in runs], 0)
    return found


def started(folder: Path, model: Path) -> Peer:
    """Start the process with `LLM`."""
    engine = {"model": str(model), "disable_log_stats": True} | ENGINE | workload.POOLING_ENGINE
    command = [sys.executable, str(offline.__file__), "ADDRESS", json.dumps(engine)]
    path = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
    return Peer("offline", folder, command, {"PYTHONPATH": path})


async def measure(quick: bool, model: Path) -> dict[str, Any]:
    """Run all repeats; return the part's figures."""
    count, rounds = (500, 2) if quick else (REQUESTS, 5)
    words = CPU_ENGINE_ARGS.replace("--max-num-seqs 32", "--max-num-seqs 256")
    words += " --max-num-batched-tokens 8192 --no-enable-prefix-caching"
    words += " --runner pooling --convert embed"
    runs: list[dict[str, Any]] = []
    places: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as folder:
        peer = started(Path(folder), model)
        try:
            await asyncio.to_thread(peer.wait_ready)
            async with warm_engine(model, words) as forms:
                short = PoolingShort(forms, peer, count)
                await short.learn()
                for form in FORMS:
                    await short.time(form)
                for number in range(rounds):
                    order = report.in_turn(FORMS, number)
                    runs.append({form: await short.time(form) for form in order})
                for form in FORMS:
                    if not form.endswith("offline"):
                        await short.time(form, where := Where())
                        places[form] = per_request(where, count)
        finally:
            peer.stop()
    return {
        "model": model.name, "requests": count, "letters": LETTERS,
        "engine_args": words,
        "reached": reached(runs), "cpu_us_by_layer": places,
    }  # fmt: skip
