"""The least that a queue costs: a loop that pops, answers and writes in groups, and nothing else.

    floor.py REDIS_URL LIST SLOTS LATENCY_S STEP_S COUNT

It takes the same messages to the same simulated engine in groups of the worker's size, with
redis-py, and promises nothing: no lease, no check of a request, no counter, no fenced result.
Prints its CPU microseconds a request as JSON. What the worker takes above it is what the guarantees
cost; what both take more on a slow machine is the machine's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import orjson

from contract.redis import keys
from contract.redis.connect import connect_async
from worker.drain.committer import LINGER_S, STEP_GROUP
from worker.engine import EngineRequest
from worker.engine.simulated.engine import SimulatedEngine


class Floor:
    """One queue, one engine, `count` requests."""

    def __init__(self, url: str, key: str, engine: SimulatedEngine, count: int) -> None:
        self.redis = connect_async(url, "floor")
        self.key = key
        self.engine = engine
        self.left = count
        self.room = engine.slots + engine.slots // 4
        self.group = engine.slots // 8
        self.free = asyncio.Event()
        self.ended: dict[str, bytes] = {}
        self.due = asyncio.Event()

    async def run(self) -> float:
        """Drain; return the CPU seconds from the first message to the last result."""
        key = self.key
        await self.engine.start()
        await self.redis.blmove(key, key, 0, "RIGHT", "RIGHT")
        began = time.process_time()
        writing = asyncio.create_task(self.write())
        tasks: set[asyncio.Task[None]] = set()
        while messages := await self.redis.rpop(key, self.room):
            self.room -= len(messages)
            for message in messages:
                task = asyncio.create_task(self.serve(message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while self.room < self.group:
                self.free.clear()
                await self.free.wait()
        await writing
        return time.process_time() - began

    async def serve(self, message: bytes) -> None:
        """Decode, answer, leave the result to be written."""
        envelope = orjson.loads(message)
        headers = envelope["headers"]
        body: dict[str, Any] = orjson.loads(envelope["body"])[0][0]
        request = EngineRequest(headers["warmq"]["url"], body)
        completion = await self.engine.generate(request, headers["id"])
        self.ended[keys.result_key(headers["id"])] = completion.body
        if len(self.ended) == 1:
            asyncio.get_running_loop().call_soon(self.linger)

    def linger(self) -> None:
        """Write what ended with the first one, or wait for more: the worker's rule."""
        if len(self.ended) >= STEP_GROUP:
            self.due.set()
        else:
            asyncio.get_running_loop().call_later(LINGER_S, self.due.set)

    async def write(self) -> None:
        """Write results in groups until all are written."""
        while self.left:
            await self.due.wait()
            self.due.clear()
            ended, self.ended = self.ended, {}
            await self.redis.mset(ended)
            self.left -= len(ended)
            self.room += len(ended)
            self.free.set()


def main() -> None:
    """Run once."""
    url, key, slots, latency_s, step_s, count = sys.argv[1:]
    engine = SimulatedEngine(int(slots), float(latency_s), step_s=float(step_s))
    used_s = asyncio.run(Floor(url, key, engine, int(count)).run())
    print(json.dumps(1e6 * used_s / int(count)))


if __name__ == "__main__":
    main()
