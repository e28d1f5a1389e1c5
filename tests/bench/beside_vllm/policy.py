"""What vLLM's policy `priority` costs a batch alone, against `fcfs`: two real engines in turn.

Both engines are warm in this process, each with a drain and a Redis; one works while the other
waits. Their runs take turns within each pair.

short    prompts of 8 to 32 words, answers of 1 to 4 tokens: most requests a second
tokens   answers of 64 tokens: most steps of the scheduler
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.beside_vllm.forms import Forms, warm_engine
from bench.beside_vllm.short import ENGINE_ARGS, Short
from bench.common import report
from bench.common.load import cpu_s

POLICIES = ("fcfs", "priority")
KINDS = ("short", "tokens")
TITLE = "a batch alone, vLLM's policy priority ÷ fcfs; ratios are of pairs"
EXPECTED = {
    "written": "before the first run",
    "short_priority_to_fcfs": 1.0,
    "tokens_priority_to_fcfs": 1.0,
    "why": "a heap of at most 64 waiting requests: some comparisons in Python for each request",
}
BARS = {"short_priority_to_fcfs": 0.99, "tokens_priority_to_fcfs": 0.99}


class Engine:
    """A warm engine with one policy."""

    def __init__(self, forms: Forms, count: int) -> None:
        self._forms, self._count = forms, count
        self._short = Short(forms, count)
        self._adapter: Any = forms.drain.supervisor.engine

    async def learn(self) -> None:
        """Let the fast path learn the forms of both kinds, and warm the engine."""
        await self._short.learn()
        for kind in KINDS:
            await self.time(kind)

    async def time(self, kind: str) -> dict[str, float]:
        """Run a batch; return its rate and the CPU of the engine's processes for each request."""
        before = self._engine_cpu_s()
        if kind == "short":
            found = await self._short.time("queue")
            rate = found["requests_per_s"]
        else:
            found = await self._forms.time("queue", self._count // 5)
            rate = found["tokens_per_s"]
        requests = self._count if kind == "short" else self._count // 5
        return {"rate": rate, "engine_us": 1e6 * (self._engine_cpu_s() - before) / requests}

    def _engine_cpu_s(self) -> float:
        return sum(cpu_s(process.pid) for process in self._adapter._warnings.processes)


def reached(kind: str, runs: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return one kind's paired ratios, and the rates by policy."""
    ratios = [run["priority"]["rate"] / run["fcfs"]["rate"] for run in runs]
    cpu = [run["priority"]["engine_us"] / run["fcfs"]["engine_us"] for run in runs]
    found = {
        f"{kind}_priority_to_fcfs": report.spread(ratios),
        f"{kind}_engine_cpu_priority_to_fcfs": report.spread(cpu),
    }
    for policy in POLICIES:
        found[f"{kind}_{policy}_per_s"] = report.spread([run[policy]["rate"] for run in runs], 0)
    return found


async def measure(quick: bool, model: Path) -> dict[str, Any]:
    """Run all pairs; return the part's figures."""
    count, pairs = (500, 2) if quick else (1500, 9)
    runs: dict[str, list[dict[str, dict[str, float]]]] = {kind: [] for kind in KINDS}
    args = {policy: f"{ENGINE_ARGS} --scheduling-policy {policy}" for policy in POLICIES}
    async with warm_engine(model, args["fcfs"]) as one, warm_engine(model, args["priority"]) as two:
        engines = {"fcfs": Engine(one, count), "priority": Engine(two, count)}
        for engine in engines.values():
            await engine.learn()
        for number in range(pairs):
            for kind in KINDS:
                order = report.in_turn(POLICIES, number)
                runs[kind].append({policy: await engines[policy].time(kind) for policy in order})
    figures = [reached(kind, runs[kind]) for kind in KINDS]
    return {
        "model": model.name, "requests": count, "engine_args": ENGINE_ARGS,
        "reached": figures[0] | figures[1],
    }  # fmt: skip
