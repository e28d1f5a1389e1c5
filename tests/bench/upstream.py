"""The openai engine's throughput over a bare aiohttp client's at its best, on the same vLLM server.

The bare client streams the same chats as the engine does, reads each to its end and keeps a fixed
number in flight; the engine finds its number itself. Rounds take turns.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import aiohttp
import orjson
import report
from vllm_server import KEY, VllmServer

from contract.body import CHAT_URL
from demo.stack import CPU_ENGINE_ARGS, MODEL
from worker.engine import EngineRequest
from worker.engine.exchange import STREAM_INTERVAL
from worker.engine.openai import OpenAIEngine
from worker.settings import WorkerSettings

BAR = 0.98
#: The server runs 32 at once.
CONCURRENCY = (32, 48, 64)
TOKENS = 32


def body(n: int) -> dict[str, Any]:
    """Return a chat of a fixed number of tokens."""
    messages = [{"role": "user", "content": f"What is {n % 90} + {n % 7}?"}]
    return {
        "model": str(MODEL), "messages": messages, "max_tokens": TOKENS, "ignore_eos": True,
        "temperature": 0,
    }  # fmt: skip


async def bare(session: aiohttp.ClientSession, url: str, n: int) -> None:
    """Stream one chat and parse its chunks."""
    streamed = body(n) | {
        "stream": True, "stream_options": {"include_usage": True},
        "stream_interval": STREAM_INTERVAL,
    }  # fmt: skip
    async with session.post(
        url + "/chat/completions", data=orjson.dumps(streamed),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    ) as response:  # fmt: skip
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                orjson.loads(line[6:])


async def timed(ask: Callable[[int], Awaitable[object]], count: int, at_once: int) -> float:
    """Return requests per second with `at_once` asking one after another."""
    queue = iter(range(count))

    async def one_after_another() -> None:
        for n in queue:
            await ask(n)

    began = time.monotonic()
    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return count / (time.monotonic() - began)


async def measure(url: str, count: int, rounds: int) -> dict[str, list[float]]:
    """Return requests per second of each client, round by round; the first is thrown away."""
    engine = OpenAIEngine(WorkerSettings(
        engine="openai", openai_base_urls=url, openai_api_key=KEY, model=None,
    ))  # fmt: skip
    await engine.start()
    found: dict[str, list[float]] = {}
    # Below the 5 s after which the server closes what idled while the others had their turn.
    connector = aiohttp.TCPConnector(limit=256, keepalive_timeout=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        for number in range(rounds + 1):
            speeds = {
                f"bare {at_once}": await timed(lambda n: bare(session, url, n), count, at_once)
                for at_once in CONCURRENCY
            }
            speeds["engine"] = await timed(
                lambda n: engine.generate(EngineRequest(CHAT_URL, body(n)), f"r{n}"), count, 80
            )
            for name, speed in speeds.items() if number else ():
                found.setdefault(name, []).append(speed)
    await engine._close()
    return found


def run(quick: bool) -> None:
    """Start the server, measure, save and print."""
    count, rounds = (100, 1) if quick else (300, 9)
    load = report.load_now()
    with tempfile.TemporaryDirectory() as folder:
        server = VllmServer(Path(folder) / "vllm.log")
        server.start()
        try:
            found = asyncio.run(measure(server.url, count, rounds))
        finally:
            server.kill()
    best = max((n for n in found if n != "engine"), key=lambda n: statistics.median(found[n]))
    ratio = [mine / bare for mine, bare in zip(found["engine"], found[best], strict=True)]
    figures = {name: report.spread(values, 1) for name, values in found.items()}
    if not quick:
        report.save("upstream", {
            "load_before": load, "load_after": report.load_now(), "requests": count,
            "tokens": TOKENS, "engine_args": CPU_ENGINE_ARGS, "requests_per_s": figures,
            "best_bare": best, "engine_over_best": report.spread(ratio), "bar": BAR,
        })  # fmt: skip
    report.table(
        f"requests/s of {TOKENS} tokens on one vLLM server",
        ["client", "requests/s"],
        [[name, report.shown(f)] for name, f in figures.items()],
    )
    print(f"engine over {best}: {report.shown(report.spread(ratio))}, bar {BAR}")


if __name__ == "__main__":
    run("--quick" in sys.argv)
