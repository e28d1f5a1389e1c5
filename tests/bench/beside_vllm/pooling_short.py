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
import time
from pathlib import Path
from typing import Any

from bench.beside_vllm.forms import Forms, warm_engine
from bench.beside_vllm.where import Where, per_request
from bench.common import report
from bench.common.load import Held, cpu_s, hold
from bench.gpu import offline, workload
from bench.gpu.pairs import Peer

from contract.redis import keys
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
        self._lean = self._adapter._fast
        self._wanted = workload.requests(count, (0, 0), LETTERS)
        self._runs = 0

    async def time(self, form: str, where: Where | None = None) -> dict[str, Any]:
        """Run all requests one way; `where` is told of the loop meanwhile."""
        self._runs += 1
        pooling = "score" if form.startswith("score_") else "embed"
        kind = form.removeprefix("score_")
        if kind == "offline":
            return {"form": form} | await self._offline(pooling)
        self._adapter._fast = None if kind.endswith("full") else self._lean
        held = await asyncio.to_thread(self._hold, pooling) if kind.startswith("queue") else None
        await asyncio.sleep(0.2)
        cpu = cpu_s(os.getpid())
        if where is not None:
            where.start()
        if held is not None:
            seconds = await self._queued(held)
        else:
            seconds = await self._direct(kind, pooling)
        if where is not None:
            where.stop()
        cpu = cpu_s(os.getpid()) - cpu
        self._adapter._fast = self._lean
        return {"form": form} | self._figures(seconds, cpu)

    def _figures(self, seconds: float, cpu: float) -> dict[str, float]:
        return {
            "requests_per_s": round(self._count / seconds, 1),
            "cpu_us_per_request": round(1e6 * cpu / self._count, 1),
        }

    async def _offline(self, pooling: str) -> dict[str, float]:
        found = await asyncio.to_thread(
            self._peer.ask, count=self._count, tokens=(0, 0), letters=LETTERS, pooling=pooling
        )
        return self._figures(found["seconds"], found["cpu_s"])

    async def _queued(self, held: Held) -> float:
        began = await asyncio.to_thread(held.release)
        ended = await asyncio.to_thread(held.wait)
        found = held.client.hgetall(keys.batch_key(held.batch.id))
        assert int(found[b"completed"]) == self._count, found
        held.client.flushdb()
        held.client.close()
        return ended - began

    def _hold(self, pooling: str) -> Held:
        return hold(
            self._forms._server.client(), f"pooling{self._runs}", self._count,
            lambda number: workload.body(self._wanted[number - 1], pooling),
            url=workload.url(pooling),
        )  # fmt: skip

    async def _direct(self, kind: str, pooling: str) -> float:
        left = list(enumerate(self._wanted))[::-1]
        one = self._bare if kind == "bare" else self._through

        async def keep_going() -> None:
            while left:
                number, (text, _) = left.pop()
                await one(text, pooling, f"pooling{self._runs}-{number}")

        began = time.perf_counter()
        await asyncio.gather(*(keep_going() for _ in range(self._forms.drain.room.limit)))
        return time.perf_counter() - began

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
