"""A process with the drain over a simulated engine whose requests take time in proportion to their
tokens; writes what it served.

    priced.py TRACE

`max_tokens` of a body says how many tokens its answer has. Each request that ends is a line of
TRACE: `<custom_id> <begun> <ended> <tokens>`, seconds of time.monotonic(). SIGTERM ends it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from contract.settings import load
from worker.drain.drain import Drain
from worker.drain.leases import Leases
from worker.drain.loop import run_drain
from worker.drain.side_tasks import SideTasks
from worker.engine import Completion, EngineRequest
from worker.engine.simulated import SimulatedSettings
from worker.engine.simulated.engine import SimulatedEngine


class PricedEngine(SimulatedEngine):
    """The simulated engine; its setting of a latency is that of one token, in seconds."""

    def __init__(self, settings: SimulatedSettings, trace: Path) -> None:
        super().__init__(settings.simulated_slots, settings.simulated_tests.latency_s)
        self._trace = trace.open("w", buffering=1 << 20)

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Answer with as many tokens as the body allows."""
        tokens = int(request.body["max_tokens"])
        took = self._latency() * tokens
        async with self._free.hold(request.priority):
            self.running += 1
            begun = time.monotonic()
            await asyncio.sleep(took)
            self.running -= 1
        name = request.body["prompt"]
        self._trace.write(f"{name} {begun:.6f} {time.monotonic():.6f} {tokens}\n")
        usage = {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
        choice = {"index": 0, "text": f"simulated {name}", "finish_reason": "length"}
        body = {"id": request_id, "object": "text_completion", "choices": [choice], "usage": usage}
        return Completion(orjson.dumps(body), 0, tokens)

    def shutdown(self) -> None:
        """Close the trace."""
        self._trace.close()


async def main(trace: Path) -> None:
    """Drain until SIGTERM."""
    settings = load(SimulatedSettings)
    leases = Leases(settings, f"priced.{os.getpid()}")
    drain = Drain(settings, leases, lambda: PricedEngine(settings, trace))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drain.hurry)
    await run_drain(drain, SideTasks(drain).tasks())
    await leases.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
