"""One real vLLM engine in this process, with the drain over it and ways to run requests through.

bare     AsyncLLMEngine.generate() with SamplingParams, kept as full as the drain keeps it
classes  the adapter: vLLM's own request, serving and response classes, no queue
queue    queued in Redis beforehand; from the release to the last committed result
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.common.load import Held, cpu_s, hold

from contract.openai.body import COMPLETION_URL
from contract.redis import keys
from contract.settings import load
from demo.stack import CPU_ENGINE_ARGS, RedisServer, eventually
from worker.drain.drain import Drain
from worker.drain.leases import Leases
from worker.drain.lifecycle import State
from worker.drain.loop import run_drain
from worker.drain.side_tasks import SideTasks
from worker.engine import EngineRequest
from worker.engine.catalogue import make_engine
from worker.engine.vllm_settings import VllmSettings

TOKENS = 64
FORMS = ("bare", "classes", "queue")


def body(number: int) -> dict[str, Any]:
    """Return one request: 64 tokens, greedy, whatever the model would like to end."""
    return {
        "prompt": f"Question number {number}: what is the first letter of the alphabet?",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


class Forms:
    """The drain over one engine, idle unless a measurement has released a batch."""

    def __init__(self, drain: Drain, server: RedisServer) -> None:
        self.drain = drain
        self._engine: Any = drain.supervisor.engine
        self._server = server
        self._runs = 0

    async def time(
        self,
        form: str,
        count: int,
        look_ahead: int | None = None,
        beside: Callable[[str, list[str]], None] | None = None,
    ) -> dict[str, Any]:
        """Run `count` requests one way; return tokens per second and this process's CPU.

        `beside` is called with Redis' URL and the request ids before the queue is released.
        """
        settings = self.drain.settings
        self.drain.settings = settings.model_copy(update={"look_ahead": look_ahead})
        self.drain.set_limits()
        held = await asyncio.to_thread(self.held, count, body) if form == "queue" else None
        if beside is not None and held is not None:
            beside(self._server.url, held.request_ids)
            await asyncio.sleep(1)  # its own start is not what is measured
        await asyncio.sleep(0.2)
        cpu = cpu_s(os.getpid())
        if held is not None:
            seconds = await self.queued(held)
        else:
            seconds = await self.direct(getattr(self, f"_{form}"), count)
        cpu = cpu_s(os.getpid()) - cpu
        return {
            "form": form,
            "limit": self.drain.limits.limit,
            "tokens_per_s": count * TOKENS / seconds,
            "cpu_us_per_request": 1e6 * cpu / count,
        }

    async def queued(self, held: Held, **counted: int) -> float:
        """Release a batch, wait for its end; return seconds. What it counted must be this."""
        began = await asyncio.to_thread(held.release)
        ended = await asyncio.to_thread(held.wait)
        found = held.client.hgetall(keys.batch_key(held.batch.id))
        assert all(int(found[name.encode()]) == value for name, value in counted.items()), found
        held.client.flushdb()
        held.client.close()
        return ended - began

    async def direct(self, one: Callable[[int, str], Awaitable[None]], count: int) -> float:
        """Run requests 1 to `count` without the queue, as many at once as the drain keeps.

        Returns seconds; `one` is called with a request's number and id.
        """
        self._runs += 1
        numbers = list(range(count, 0, -1))

        async def keep_going() -> None:
            while numbers:
                number = numbers.pop()
                await one(number, f"direct{self._runs}-{number}")

        began = time.perf_counter()
        await asyncio.gather(*(keep_going() for _ in range(self.drain.limits.limit)))
        return time.perf_counter() - began

    def held(
        self, count: int, make: Callable[[int], dict[str, Any]], url: str = COMPLETION_URL
    ) -> Held:
        """Queue requests that no worker sees yet."""
        self._runs += 1
        return hold(self._server.client(), f"held{self._runs}", count, make, url=url)

    async def _bare(self, number: int, request_id: str) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        prompt = body(number)["prompt"]
        async for output in self._engine._engine.generate(prompt, params, request_id):
            assert len(output.outputs[0].token_ids) == TOKENS

    async def _classes(self, number: int, request_id: str) -> None:
        answer = await self._engine.generate(
            EngineRequest(COMPLETION_URL, body(number)), request_id
        )
        assert answer.completion_tokens == TOKENS


@asynccontextmanager
async def warm_engine(model: Path, engine_args: str = CPU_ENGINE_ARGS) -> AsyncIterator[Forms]:
    """Start Redis, the engine and the drain over it, as worker/process/bootstep.py does."""
    with (
        tempfile.TemporaryDirectory(prefix="warmq-bench-") as folder,
        RedisServer(Path(folder)) as server,
    ):
        settings = load(
            VllmSettings, redis_url=server.url, model=str(model),
            engine_args=engine_args, look_ahead=None,
        )  # fmt: skip
        leases = Leases(settings, f"bench.{os.getpid()}")
        drain = Drain(settings, leases, lambda: make_engine(settings))
        running = asyncio.create_task(run_drain(drain, SideTasks(drain).tasks()))
        lifecycle = drain.lifecycle
        await asyncio.to_thread(
            eventually, lambda: lifecycle.state is State.READY or running.done(), 300, "the engine"
        )
        if not running.done():
            yield Forms(drain, server)
            drain.stop()
        await running
        await leases.close()
