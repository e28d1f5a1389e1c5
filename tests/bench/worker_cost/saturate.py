"""A lean process that speaks the worker's real POP and DONE and has no engine: it loads Redis.

    saturate.py REDIS_URL GROUP

It waits for requests, leases GROUP at a time, commits as many results of the simulated engine's
size in one DONE, and ends when the queue is empty.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from contract.message import Delivery
from contract.results import success_meta
from contract.settings import load
from worker.drain.endings import Ending
from worker.drain.leases import Leases
from worker.engine.simulated import SimulatedSettings

ANSWER = (
    b'{"id":"00000000-0000-0000-0000-000000000000","object":"text_completion","model":"simulated",'
    b'"choices":[{"index":0,"finish_reason":"stop","text":"simulated 0123456789abcdef"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
TIMING: dict[str, float | int] = {"queued_ms": 1000, "engine_ms": 200, "attempts": 1}


def _completed(delivery: Delivery) -> Ending:
    meta = success_meta(delivery, ANSWER, TIMING)
    return Ending(delivery, "completed", meta, prompt_tokens=1, completion_tokens=1)


async def main(url: str, group: int) -> int:
    """Wait for the queue to fill, empty it; return how many results were written."""
    settings = load(SimulatedSettings, redis_url=url, engine="simulated")
    leases = Leases(settings, f"saturate.{os.getpid()}.bench")
    while not await leases.waiting():  # noqa: ASYNC110 - it is filled from outside
        await asyncio.sleep(0.01)
    written = 0
    while popped := (await leases.pop(group, group)).deliveries:
        written += await leases.done([_completed(delivery) for delivery in popped])
    await leases.close()
    return written


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], int(sys.argv[2]))))
