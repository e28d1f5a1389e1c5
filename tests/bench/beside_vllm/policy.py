"""What vLLM's policy `priority` costs a batch alone, against `fcfs`, in one real engine.

The policy of the idle engine's scheduler is changed between runs, so that both have the same
processes and cores. Runs take turns within each round. `again` is fcfs once more: its ratio shows
how much two equal runs differ on this machine.

short    prompts of 8 to 32 words, answers of 1 to 4 tokens: most requests a second
tokens   answers of 64 tokens: most steps of the scheduler
queue    the CPU that vLLM's queue of waiting requests takes for each request, by itself
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.beside_vllm.forms import Forms, warm_engine
from bench.beside_vllm.short import ENGINE_ARGS, Short
from bench.common import report
from bench.common.load import cpu_s

from worker.engine.vllm.priorities import RANGE

#: The runs of a round, and the policy of each.
RUNS = {"fcfs": "fcfs", "priority": "priority", "again": "fcfs"}
KINDS = ("short", "tokens")
#: The scheduler whose policy changes between runs.
SCHEDULER = "bench.beside_vllm.switched.SwitchedScheduler"
#: Waiting requests: the look-ahead of an engine with 256 slots.
WAITING = 64
TITLE = "a batch alone, vLLM's policy priority ÷ fcfs; ratios are of pairs"
EXPECTED = {
    "written": "before the first run",
    "short_priority_to_fcfs": 1.0,
    "tokens_priority_to_fcfs": 1.0,
    "why": "a heap of at most 64 waiting requests: some comparisons in Python for each request",
}
BARS = {"short_priority_to_fcfs": 0.99, "tokens_priority_to_fcfs": 0.99}


class Engine:
    """The warm engine, with SwitchedScheduler."""

    def __init__(self, forms: Forms, count: int) -> None:
        self._forms, self._count = forms, count
        self._short = Short(forms, count)
        self._adapter: Any = forms.drain.supervisor.engine

    async def learn(self) -> None:
        """Let the fast path learn the forms of both kinds, and warm the engine."""
        await self._short.learn()
        for kind in KINDS:
            await self.time(kind, "priority")

    async def time(self, kind: str, policy: str) -> dict[str, float]:
        """Run a batch; return its rate and the CPU of the engine's processes for each request."""
        assert await self._adapter._engine.reset_prefix_cache(policy == "priority")
        before = self._engine_cpu_s()
        if kind == "short":
            rate = (await self._short.time("queue"))["requests_per_s"]
        else:
            rate = (await self._forms.time("queue", self._count // 5))["tokens_per_s"]
        requests = self._count if kind == "short" else self._count // 5
        return {"rate": rate, "engine_us": 1e6 * (self._engine_cpu_s() - before) / requests}

    def _engine_cpu_s(self) -> float:
        return sum(cpu_s(process.pid) for process in self._adapter._warnings.processes)


def reached(kind: str, rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return one kind's paired ratios, and the rates by run."""
    found: dict[str, Any] = {}
    for figure, name in (("rate", ""), ("engine_us", "engine_cpu_")):
        for run in ("priority", "again"):
            ratios = [one[run][figure] / one["fcfs"][figure] for one in rounds]
            found[f"{kind}_{name}{run}_to_fcfs"] = report.spread(ratios)
    for run in RUNS:
        found[f"{kind}_{run}_per_s"] = report.spread([one[run]["rate"] for one in rounds], 0)
    return found


def queue_us(policy: str, count: int = 3000) -> float:
    """Return the CPU in µs for each request that enters and leaves vLLM's queue."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
    from vllm.v1.request import Request

    requests = [
        Request(
            request_id=str(n), prompt_token_ids=[1, 2, 3], pooling_params=None,
            sampling_params=SamplingParams(max_tokens=4), arrival_time=float(n), priority=6 * RANGE,
        )
        for n in range(WAITING + count)
    ]  # fmt: skip
    queue = create_request_queue(SchedulingPolicy(policy))
    for request in requests[:WAITING]:
        queue.add_request(request)
    began = time.process_time()
    for request in requests[WAITING:]:
        queue.add_request(request)
        queue.peek_request()
        queue.pop_request()
    return 1e6 * (time.process_time() - began) / count


async def measure(quick: bool, model: Path) -> dict[str, Any]:
    """Run all rounds; return the part's figures."""
    count, number_of_rounds = (500, 2) if quick else (1000, 6)
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {kind: [] for kind in KINDS}
    found: dict[str, Any] = {}
    args = f"{ENGINE_ARGS} --scheduling-policy priority --scheduler-cls {SCHEDULER}"
    async with warm_engine(model, args) as forms:
        engine = Engine(forms, count)
        await engine.learn()
        for number in range(number_of_rounds):
            for kind in KINDS:
                order = report.in_turn(list(RUNS), number)
                rounds[kind].append({run: await engine.time(kind, RUNS[run]) for run in order})
    for kind in KINDS:
        found |= reached(kind, rounds[kind])
    for policy in ("fcfs", "priority"):
        repeats = [queue_us(policy) for _ in range(number_of_rounds)]
        found[f"queue_{policy}_us_per_request"] = report.spread(repeats, 2)
    return {
        "model": model.name, "requests": count, "engine_args": ENGINE_ARGS, "reached": found,
    }  # fmt: skip
