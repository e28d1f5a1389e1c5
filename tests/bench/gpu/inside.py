"""Loaded into the real worker process (`--include`): runs requests past the queue, counts steps.

It answers a socket from a thread of its own; what it runs, it runs on the drain's
loop and on the drain's engine. While the queue is measured it only counts engine
steps.

bare     AsyncLLMEngine.generate() with final-only output, as many in flight as the drain's
all      the same, everything handed over at once
classes  the adapter, no queue: past vLLM's serving classes where that is possible
full     the adapter through vLLM's own request, serving and response classes
queue    nothing is run here

Of a pooling model `bare` is AsyncLLM.encode().
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Client, Connection
from typing import Any

from bench.common.load import cpu_s
from bench.gpu import workload
from celery import signals

from demo.stack import eventually
from worker.drain.lifecycle import State
from worker.engine import EngineRequest
from worker.process.bootstep import current

One = Callable[[tuple[str, int], str, str | None], Awaitable[None]]


class Steps:
    """Engine steps from the first full one to the last with more requests left to give it."""

    def __init__(self, pass_on: Callable[..., None]) -> None:
        self._pass_on = pass_on
        self.begin(1, lambda _: False)

    def begin(self, slots: int, backlog: Callable[[int], bool]) -> None:
        """Count anew; `backlog` is asked after each step, told how many wait in the engine."""
        self.slots, self.backlog = slots, backlog
        self.steps = self.running = self.waiting = self.tokens = self.before = self.starved = 0

    def __call__(self, scheduler: Any = None, iteration: Any = None, **more: Any) -> None:
        self._pass_on(scheduler, iteration, **more)
        if scheduler is None or not self.backlog(scheduler.num_waiting_reqs):
            return
        running = scheduler.num_running_reqs
        if not self.steps and running < self.slots:
            self.before += 1
            return
        self.steps += 1
        self.running += running
        self.waiting += scheduler.num_waiting_reqs
        self.starved += scheduler.num_waiting_reqs == 0
        self.tokens += iteration.num_generation_tokens if iteration is not None else 0

    def seen(self) -> dict[str, Any]:
        """Return means per step; `running` is what is left after a step has ended requests."""
        if not self.steps:
            return {"steps": 0}
        # Without VLLM_LOG_STATS_INTERVAL the worker's vLLM counts no tokens: then none are told.
        tokens = {"tokens_per_step": self.tokens / self.steps} if self.tokens else {}
        return tokens | {
            "steps": self.steps,
            "steps_until_full": self.before,
            "running_per_step": self.running / self.steps,
            "waiting_per_step": self.waiting / self.steps,
            "steps_without_waiting": self.starved / self.steps,
        }


class Inside:
    """The answering thread."""

    def __init__(self) -> None:
        self.step = current()
        self.runs = 0
        self.cpu = 0.0
        self.cached = 0

    def serve(self) -> None:
        """Answer until told to end."""
        eventually(lambda: self.step.drain is not None, 60, "the drain", 0.1)
        self.drain: Any = self.step.drain
        eventually(lambda: self.drain.lifecycle.state is State.READY, 900, "the engine", 0.1)
        eventually(lambda: self.drain.limits.limit, 60, "the drain's size", 0.1)
        self.adapter: Any = self.drain.supervisor.engine
        progress = self.adapter._progress
        self.steps = progress.record = Steps(progress.record)
        with Client(os.environ["BENCH_ADDRESS"]) as line:
            line.send("ready")
            self._answer(line)

    def _answer(self, line: Connection) -> None:
        while ask := line.recv():
            try:
                line.send(getattr(self, ask["do"])(ask))
            except Exception as error:
                line.send({"error": repr(error)})

    def size(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Set the look-ahead of the drain."""
        settings = self.drain.settings
        self.drain.settings = settings.model_copy(update={"look_ahead": ask["look_ahead"]})
        self.step.run_on_loop(self._size(), 10)
        return {"limit": self.drain.limits.limit, "slots": self.drain.limits.slots}

    async def _size(self) -> None:
        self.drain.set_limits()

    def watch(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Count the steps of what the queue is about to bring."""
        last = self.drain.counts.popped + ask["count"]
        # What pools has left the engine after the step that took it: no slot is taken then.
        slots = 0 if ask.get("pooling") else self.drain.limits.slots
        self.steps.begin(slots, lambda _: self.drain.counts.popped < last)
        self.cpu = cpu_s(os.getpid())
        self.cached = self.adapter.cached_prompt_tokens()
        return {}

    def watched(self, _: dict[str, Any]) -> dict[str, Any]:
        """Return what was counted since `watch`."""
        return {
            "cpu_s": cpu_s(os.getpid()) - self.cpu,
            "cached_tokens": self.adapter.cached_prompt_tokens() - self.cached,
        } | self.steps.seen()

    def direct(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Run requests past the queue."""
        self.runs += 1
        self.cpu = cpu_s(os.getpid())
        self.cached = self.adapter.cached_prompt_tokens()
        seconds = self.step.run_on_loop(self._direct(ask), 600)
        return {"seconds": seconds} | self.watched(ask)

    async def _direct(self, ask: dict[str, Any]) -> float:
        form, count, pooling = ask["form"], ask["count"], ask.get("pooling")
        left = list(enumerate(workload.requests(count, ask["tokens"], ask["letters"])))[::-1]
        one: One = self._classes if form in ("classes", "full") else self._bare
        flight = count if form == "all" else self.drain.limits.limit
        self.steps.begin(
            0 if pooling else self.drain.limits.slots,
            lambda waiting: waiting > 0 if form == "all" else bool(left),
        )

        async def keep_going() -> None:
            while left:
                number, request = left.pop()
                await one(request, f"direct{self.runs}-{number}", pooling)

        lean = self.adapter._fast
        self.adapter._fast = None if form == "full" else lean
        began = time.perf_counter()
        await asyncio.gather(*(keep_going() for _ in range(flight)))
        seconds = time.perf_counter() - began
        self.adapter._fast = lean
        return seconds

    async def _bare(self, request: tuple[str, int], request_id: str, pooling: str | None) -> None:
        from vllm import PoolingParams, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt, tokens = request
        engine = self.adapter._engine
        if pooling:
            texts = workload.sides(prompt) if pooling == "score" else (prompt,)

            async def encode(number: int, text: str) -> None:
                name = f"{request_id}-{number}"
                async for output in engine.encode(text, PoolingParams(task="embed"), name):
                    assert output.outputs.data.numel() > 1

            await asyncio.gather(*(encode(*one) for one in enumerate(texts)))
            return
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        async for output in engine.generate(prompt, params, request_id):
            assert len(output.outputs[0].token_ids) == tokens

    async def _classes(
        self, request: tuple[str, int], request_id: str, pooling: str | None
    ) -> None:
        body = workload.body(request, pooling)
        answer = await self.adapter.generate(EngineRequest(workload.url(pooling), body), request_id)
        assert answer.completion_tokens == (0 if pooling else request[1])


@signals.worker_ready.connect(weak=False)
def _start(**_: Any) -> None:
    threading.Thread(target=Inside().serve, name="bench", daemon=True).start()
