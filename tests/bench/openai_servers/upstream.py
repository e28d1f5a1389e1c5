"""The openai engine's throughput over a bare aiohttp client's at its best, on the same vLLM server.

The bare client streams the same chats as the engine does, reads each to its end and keeps a fixed
number in flight; the engine finds its number itself. Rounds take turns.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from operator import mul, truediv
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
from bench.common import report
from bench.common.load import cpu_s
from kit.servers.vllm_server import KEY, VllmServer

from contract.openai.body import CHAT_URL
from demo.stack import CPU_ENGINE_ARGS, MODEL
from worker.engine import EngineRequest
from worker.engine.openai import OpenAISettings
from worker.engine.openai.engine import OpenAIEngine
from worker.engine.openai.exchange import STREAM_INTERVAL

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
    """Stream one chat and parse its chunks; again if the server has closed the connection, as it
    does after 5 s, also when this machine has stood still for so long."""
    while True:
        with suppress(aiohttp.ServerDisconnectedError):
            return await _streamed(session, url, n)


async def _streamed(session: aiohttp.ClientSession, url: str, n: int) -> None:
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


def settings_for(url: str, **more: Any) -> OpenAISettings:
    """Return a worker's settings for one server."""
    return OpenAISettings(
        engine="openai", openai_base_urls=url, openai_api_key=KEY, model=None, **more
    )


async def by_rounds(
    url: str, count: int, rounds: int, server_cpu_s: Callable[[], float]
) -> dict[str, list[float]]:
    """Return requests per second of each client, round by round, and the server's CPU for each
    request in ms; the first round is thrown away."""
    engines = {
        "engine": OpenAIEngine(settings_for(url)),
        "engine, 64 set": OpenAIEngine(settings_for(url, openai_concurrency=64)),
    }
    for engine in engines.values():
        await engine.start()
    found: dict[str, list[float]] = {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=256, keepalive_timeout=2)
    ) as session:
        clients: dict[str, tuple[Callable[[int], Awaitable[object]], int]] = {
            f"bare {at_once}": (lambda n: bare(session, url, n), at_once) for at_once in CONCURRENCY
        }
        for name, engine in engines.items():
            clients[name] = (
                lambda n, to=engine: to.generate(EngineRequest(CHAT_URL, body(n)), f"r{n}"),
                80,
            )
        names = list(clients)
        for number in range(rounds + 1):
            for name in report.in_turn(names, number):
                before = server_cpu_s()
                speed = await timed(clients[name][0], count, clients[name][1])
                busy_s = server_cpu_s() - before
                if number:
                    found.setdefault(name, []).append(speed)
                    found.setdefault(f"{name}: server's ms", []).append(1000 * busy_s / count)
    for engine in engines.values():
        await engine._close()
    return found


def measure(quick: bool) -> dict[str, Any]:
    """Start the server and measure; return the part's figures."""
    count, rounds = (100, 1) if quick else (300, 12)
    with tempfile.TemporaryDirectory() as folder:
        server = VllmServer(Path(folder) / "vllm.log")
        server.start()
        try:
            assert server.process is not None
            processes = psutil.Process(server.process.pid)
            found = asyncio.run(by_rounds(
                server.url, count, rounds,
                lambda: sum(cpu_s(it.pid) for it in (processes, *processes.children(True))),
            ))  # fmt: skip
        finally:
            server.kill()
    costs = {name: found.pop(f"{name}: server's ms") for name in list(found) if ":" not in name}
    best = max((n for n in found if "bare" in n), key=lambda n: statistics.median(found[n]))
    ratios = {}
    for name in (name for name in found if "engine" in name):
        ratios[name] = report.spread(list(map(truediv, found[name], found[best])))
        # What is left when the server's own CPU for a request, which differs from turn to turn, is
        # taken out: how busy each client keeps it.
        mine, theirs = (list(map(mul, found[n], costs[n])) for n in (name, best))
        ratios[f"{name}: how busy the server"] = report.spread(list(map(truediv, mine, theirs)))
    figures = {name: report.spread(values, 1) for name, values in found.items()}
    return {
        "requests": count, "tokens": TOKENS, "engine_args": CPU_ENGINE_ARGS,
        "requests_per_s": figures,
        "server_cpu_ms_per_request": {n: report.spread(v, 2) for n, v in costs.items()},
        "best_bare": best, "over_best": ratios, "bar": BAR,
    }  # fmt: skip


def show(data: dict[str, Any]) -> None:
    """Print each client's rate, and the engine's over the best bare one's."""
    figures = data["requests_per_s"]
    report.table(
        f"requests/s of {TOKENS} tokens on one vLLM server",
        ["client", "requests/s"],
        [[name, report.shown(f)] for name, f in figures.items()],
    )
    for name, ratio in data["over_best"].items():
        print(f"{name}, over {data['best_bare']}: {report.shown(ratio)}")
