"""HTTP clients for the openai engine: CPU and throughput at 256 in flight; the engine beside them.

Each client streams the same chats from a stub server in another process; a request's answer is
read to its end and its chunks are parsed. What is compared is what the client costs.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import orjson
from bench.common import report
from kit.servers.stub_server import StubProcess

from contract.openai.body import CHAT_URL
from worker.engine import EngineRequest
from worker.engine.openai import OpenAISettings
from worker.engine.openai.engine import OpenAIEngine

IN_FLIGHT = 256
BODY: dict[str, Any] = {
    "model": "stub", "max_tokens": 16, "messages": [{"role": "user", "content": "question"}],
}  # fmt: skip
STREAMED = BODY | {"stream": True, "stream_options": {"include_usage": True}}
CLIENTS = ("aiohttp", "httpx", "openai", "engine")
Ask = Callable[[], Awaitable[None]]


async def run_client(name: str, url: str, count: int) -> tuple[float, float]:
    """Send `count` requests with one client; return wall and CPU seconds of this process."""
    ask, close = await {
        "aiohttp": _aiohttp, "httpx": _httpx, "openai": _openai, "engine": _engine,
    }[name](url)  # fmt: skip
    await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))  # every connection is open
    queue = iter(range(count))

    async def one_after_another() -> None:
        for _ in queue:
            await ask()

    wall, cpu = time.monotonic(), _cpu()
    await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))
    spent = time.monotonic() - wall, _cpu() - cpu
    await close()
    return spent


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _aiohttp(url: str) -> tuple[Ask, Ask]:
    import aiohttp

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT))

    async def ask() -> None:
        async with session.post(
            url + "/chat/completions", data=orjson.dumps(STREAMED),
            headers={"Content-Type": "application/json"},
        ) as response:  # fmt: skip
            _parse(await response.read())

    return ask, session.close


async def _httpx(url: str) -> tuple[Ask, Ask]:
    import httpx

    client = httpx.AsyncClient(
        limits=httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT),
        timeout=None,
    )

    async def ask() -> None:
        async with client.stream(
            "POST", url + "/chat/completions", content=orjson.dumps(STREAMED),
            headers={"Content-Type": "application/json"},
        ) as response:  # fmt: skip
            _parse(await response.aread())

    return ask, client.aclose


async def _openai(url: str) -> tuple[Ask, Ask]:
    import httpx
    import openai

    limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
    client = openai.AsyncOpenAI(
        base_url=url, api_key="x", http_client=httpx.AsyncClient(limits=limits), max_retries=0
    )

    async def ask() -> None:
        stream = await client.chat.completions.create(**STREAMED)
        async for _ in stream:
            pass

    return ask, client.close


async def _engine(url: str) -> tuple[Ask, Ask]:
    engine = OpenAIEngine(OpenAISettings(
        engine="openai", openai_base_urls=url, openai_concurrency=IN_FLIGHT, model=None,
    ))  # fmt: skip
    await engine.start()

    async def ask() -> None:
        await engine.generate(EngineRequest(CHAT_URL, BODY), "r")

    return ask, engine._close


def _parse(raw: bytes) -> None:
    for line in raw.split(b"\n"):
        if line.startswith(b"data: {"):
            orjson.loads(line[6:])


def measure(quick: bool) -> dict[str, Any]:
    """Measure each client in turn, several times, in a process of its own."""
    count, repeats = (500, 1) if quick else (1000, 3)
    figures: dict[str, dict[str, list[float]]] = {
        name: {"cpu_ms": [], "per_s": []} for name in CLIENTS
    }
    with StubProcess("--slots", IN_FLIGHT) as server:
        for _ in range(repeats):
            for name in CLIENTS:  # in turn: who else uses the machine disturbs all alike
                done = subprocess.run(
                    [sys.executable, __file__, name, server.url, str(count)],
                    stdout=subprocess.PIPE, check=True,
                )  # fmt: skip
                wall, cpu = orjson.loads(done.stdout)
                figures[name]["cpu_ms"].append(1000 * cpu / count)
                figures[name]["per_s"].append(count / wall)
    versions = {name: importlib.metadata.version(name) for name in ("aiohttp", "httpx", "openai")}
    found = {
        name: {kind: report.spread(values) for kind, values in kinds.items()}
        for name, kinds in figures.items()
    }
    return {
        "in_flight": IN_FLIGHT, "requests": count, "client_versions": versions, "clients": found,
    }  # fmt: skip


def show(data: dict[str, Any]) -> None:
    """Print a row a client."""
    found = data["clients"]
    report.table(
        f"HTTP clients, {IN_FLIGHT} in flight, streamed",
        ["client", "CPU ms/request", "requests/s"],
        [[name, report.shown(f["cpu_ms"]), report.shown(f["per_s"])] for name, f in found.items()],
    )


if __name__ == "__main__":
    print(list(asyncio.run(run_client(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
