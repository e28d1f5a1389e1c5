"""The simulated engine with the costs of an RBLN card's scheduling. No figure of it is an NPU's.

What the vendor's scheduler does on the optimum path (vllm-rbln 0.12, read and run over the
stand-in for its runtime; docs/how-to/rbln.md): a waiting request is prefilled before anything is
decoded, one request per step and never mixed with decoding; a decode step costs the smallest
compiled bucket that holds the running rows, whatever its rows are. What a step costs in seconds
nobody has measured here, so `Cost` is varied over shapes and only ratios are of interest.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field

from contract.openai.body import COMPLETION_URL
from worker.engine import Capacity, Completion, EngineRequest

PREFILL_CHUNK = 128


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds: of one prefill chunk of 128 tokens, of a decode step, and of each row in it."""

    prefill_chunk_s: float
    decode_s: float
    row_s: float = 0.0
    buckets: tuple[int, ...] = (16, 8, 4, 2, 1)

    def prefill(self, prompt_tokens: int) -> float:
        """Return the seconds of one request's prefill step."""
        return math.ceil(prompt_tokens / PREFILL_CHUNK) * self.prefill_chunk_s

    def bucket(self, rows: int) -> int:
        """Return the rows that a decode step of so many running requests is paid for."""
        return min(b for b in self.buckets if b >= rows)

    def decode(self, rows: int) -> float:
        """Return the seconds of one decode step."""
        return self.decode_s + self.row_s * self.bucket(rows)


@dataclass(slots=True, eq=False)
class _Sequence:
    prompt_tokens: int
    left: int
    done: asyncio.Future[None] = field(default_factory=asyncio.Future)


class NpuModelEngine:
    """Runs bodies whose `prompt` is a list of tokens, each for exactly `max_tokens` tokens.

    Its clock is its own: costs add up and it sleeps until their sum, so a late wake-up of this
    process, which a real card would not notice, does not slow it down.
    """

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.slots = max(cost.buckets)
        #: Rows decoded, and rows paid for, over all decode steps.
        self.rows = 0
        self.paid = 0
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._came = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None

    def build(self) -> None:
        """Nothing to build."""

    async def start(self) -> Capacity:
        """Begin to step."""
        self._steps = asyncio.create_task(self._run())
        return Capacity(self.slots, 4096, "simulated", {"engine": "simulated, RBLN costs"})

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request."""
        sequence = _Sequence(len(request.body["prompt"]), request.body["max_tokens"])
        self._waiting.append(sequence)
        self._came.set()
        await sequence.done
        return Completion(b'{"simulated":true}', sequence.prompt_tokens, 0)

    async def _run(self) -> None:
        clock = time.monotonic()
        while True:
            if not (self._waiting or self._running):
                self._came.clear()
                await self._came.wait()
                clock = time.monotonic()
            if self._waiting and len(self._running) < self.slots:
                sequence = self._waiting.popleft()
                self._running.append(sequence)
                clock += self.cost.prefill(sequence.prompt_tokens)
                emitted = [sequence]
            else:
                clock += self.cost.decode(len(self._running))
                self.rows += len(self._running)
                self.paid += self.cost.bucket(len(self._running))
                emitted = list(self._running)
            await asyncio.sleep(max(0.0, clock - time.monotonic()))
            for sequence in emitted:
                sequence.left -= 1
                if sequence.left == 0:
                    self._running.remove(sequence)
                    sequence.done.set_result(None)

    def dead(self) -> bool:
        """It does not die."""
        return False

    def last_progress(self) -> float:
        """It does not hang."""
        return time.monotonic()

    def kill(self) -> None:
        """Nothing to kill."""

    def shutdown(self) -> None:
        """Stop stepping."""
        if self._steps is not None:
            self._steps.get_loop().call_soon_threadsafe(self._steps.cancel)


def request(prompt_tokens: int, max_tokens: int) -> EngineRequest:
    """Return a request of these lengths."""
    return EngineRequest(COMPLETION_URL, {"prompt": [1] * prompt_tokens, "max_tokens": max_tokens})
