"""taskiq over Redis streams (acknowledged) with one simulated engine; worker and client."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from slots import Slots
from taskiq import TaskiqEvents, TaskiqState
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

URL = os.environ["STOCK_REDIS_URL"]
results: RedisAsyncResultBackend[Any] = RedisAsyncResultBackend(URL, result_ex_time=3600)
broker = RedisStreamBroker(URL, os.environ.get("STOCK_QUEUE", "taskiq")).with_result_backend(
    results
)


@broker.on_event(TaskiqEvents.WORKER_STARTUP)
async def start_engine(state: TaskiqState) -> None:
    """Build the engine before the worker consumes."""
    state.engine = Slots()


@broker.task(task_name="generate")
async def generate(body: dict[str, Any]) -> dict[str, Any]:
    """Answer one body."""
    answer: dict[str, Any] = await broker.state.engine.generate(body, "")
    return answer


async def main() -> None:
    """Be the client."""
    from bench.peers.programs.stock_client import obey

    async def send(body: dict[str, Any]) -> str:
        return (await generate.kiq(body)).task_id

    async def fetch(key: str) -> dict[str, Any]:
        return dict((await results.get_result(key)).return_value)

    await broker.startup()
    await obey(URL, send, fetch)
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
