"""arq with one simulated engine; worker and client."""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar

from arq import create_pool
from arq.connections import RedisSettings
from arq.jobs import Job
from slots import Slots

URL = os.environ["STOCK_REDIS_URL"]


async def start_engine(context: dict[str, Any]) -> None:
    """Build the engine before the worker consumes."""
    context["engine"] = Slots()


async def generate(context: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Answer one body."""
    answer: dict[str, Any] = await context["engine"].generate(body, "")
    return answer


class WorkerSettings:
    """As arq wants them; as many at once as the engine has slots, its own default pace of polls."""

    functions: ClassVar[list[Any]] = [generate]
    on_startup = start_engine
    redis_settings = RedisSettings.from_dsn(URL)
    max_jobs = int(os.environ.get("SLOTS_NUMBER", "1"))
    keep_result = 3600


async def main() -> None:
    """Be the client."""
    from bench.peers.programs.stock_client import obey

    pool = await create_pool(WorkerSettings.redis_settings)

    async def send(body: dict[str, Any]) -> str:
        queue = os.environ.get("STOCK_QUEUE")
        sent = await pool.enqueue_job("generate", body, _queue_name=queue)
        assert sent is not None
        return f"arq:result:{sent.job_id}"

    async def fetch(key: str) -> dict[str, Any]:
        return dict(await Job(key.removeprefix("arq:result:"), pool).result())

    await obey(URL, send, fetch)
    await pool.aclose()


if __name__ == "__main__":
    asyncio.run(main())
