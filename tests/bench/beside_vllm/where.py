"""Where a loop's CPU goes: its stack looked at often, and the CPU since the last look put there.

What another thread does (the tokenizer's, ZeroMQ's) is not in the stacks; it is the process's CPU
less the loop's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

from bench.common.load import cpu_s

#: Of CPU, not of time: a timer that wakes an idle loop would be half of what is seen.
EVERY_S = 0.001
#: The first that is part of a file's path names the layer; frames are asked from the innermost out.
LAYERS = (
    ("/pydantic/", "pydantic, in and out"),
    ("/jinja2/", "chat templates"),
    ("chat_template", "chat templates"),
    ("/entrypoints/chat_utils", "chat templates"),
    ("/transformers/", "tokenizer"),
    ("/vllm/renderers/", "vLLM: prompts (renderer)"),
    ("/vllm/entrypoints/", "vLLM: serving classes"),
    ("/vllm/sampling_params", "vLLM: sampling parameters"),
    ("/vllm/v1/engine/input_processor", "vLLM: requests to EngineCore"),
    ("/vllm/v1/engine/core_client", "vLLM: requests to EngineCore"),
    ("/vllm/v1/serial_utils", "vLLM: requests to EngineCore"),
    ("/zmq/", "vLLM: ZeroMQ"),
    ("/vllm/v1/metrics", "vLLM: statistics of each step"),
    ("/vllm/v1/engine/", "vLLM: outputs, detokenizer, generators"),
    ("/vllm/", "vLLM: the rest"),
    ("/worker/engine/", "warmq: the adapter"),
    ("/redis/", "queue: Redis's client"),
    ("/contract/redis", "queue: Redis's client"),
    ("/worker/drain/", "queue: leases, checks, results"),
    ("/contract/", "queue: leases, checks, results"),
    ("/asyncio/", "asyncio"),
    ("/selectors", "asyncio"),
)


class Where:
    """CPU of the main thread by layer, in seconds, from `start` to `stop`."""

    def __init__(self) -> None:
        self.by_layer: Counter[str] = Counter()
        self._loop_s = self._process_s = 0.0

    def start(self) -> None:
        """Begin to look."""
        self._began = self._last = time.thread_time()
        self._process_began = time.process_time()
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def stop(self) -> None:
        """Look no more."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        loop = time.thread_time() - self._began
        self.by_layer["other threads"] += time.process_time() - self._process_began - loop

    def _look(self, _: int, frame: FrameType | None) -> None:
        now = time.thread_time()
        self.by_layer[layer_of(frame)] += now - self._last
        self._last = time.thread_time()  # the look itself is in nobody's share


def layer_of(frame: FrameType | None) -> str:
    """Return the layer whose code runs; asyncio's own is only what runs nobody's callback."""
    while frame is not None:
        path = frame.f_code.co_filename
        for part, layer in LAYERS:
            if part in path:
                return layer
        frame = frame.f_back
    return "the rest"


def per_request(where: Where, count: int) -> dict[str, Any]:
    """Return microseconds a request by layer, the largest first."""
    return {layer: round(1e6 * s / count, 1) for layer, s in where.by_layer.most_common()}


async def looked_at(
    adapter: Any,
    run: Callable[[], Awaitable[float]],
    count: int,
    *,
    full: bool,
    where: Where | None,
) -> dict[str, float]:
    """Run requests, through vLLM's serving classes if `full`; return their rate and CPU.

    `where` is told of the loop meanwhile.
    """
    lean = adapter._fast
    adapter._fast = None if full else lean
    await asyncio.sleep(0.2)
    cpu = cpu_s(os.getpid())
    if where is not None:
        where.start()
    seconds = await run()
    if where is not None:
        where.stop()
    cpu = cpu_s(os.getpid()) - cpu
    adapter._fast = lean
    return figures(seconds, cpu, count)


def figures(seconds: float, cpu: float, count: int) -> dict[str, float]:
    """Return requests a second, and microseconds of CPU a request."""
    return {
        "requests_per_s": round(count / seconds, 1),
        "cpu_us_per_request": round(1e6 * cpu / count, 1),
    }
