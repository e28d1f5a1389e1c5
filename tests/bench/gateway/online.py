"""Online chats through the gateway: how full the slots are, what comes on top, CPU of a request.

All are processes of their own: load client, gateway, worker with the simulated engine, Redis, and
beside it a bare server of the same kind. `direct` is the same load without HTTP: this process
queues with PUSH and hears of the results, as a gateway does. So its ms are the drain's own.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop
from bench.common import report
from bench.common.load import cpu_s, redis_cpu_s
from bench.gateway.clients import Load
from kit.gateways.gateway_process import GatewayProcess

from contract.message import write_online
from contract.naming import queue_name, turn_list
from contract.openai.body import CHAT_URL
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually, free_port
from gateway.online.pending import PendingRequests
from gateway.redis.online import OnlineRequests, Push
from gateway.settings import GatewaySettings

TITLE = (
    "online chats through the gateway; added = on top of the engine's time, direct = the same "
    "without HTTP"
)
EXPECTED = {
    "written": "before the first run",
    "occupancy": 0.96,
    "added_ms_p50": 8,
    "added_ms_p99": 25,
    "over_direct_ms_p50": 2,
    "over_direct_ms_p99": 8,
    "gateway_us": 300,
    "bare_us": 65,
    "why": "a result lingers for up to 8 ms to share a DONE; PUSH and POP are a round trip each",
}
BARS = {
    "occupancy": 0.98, "over_direct_ms_p50": 5, "over_direct_ms_p99": 30, "gateway_us": 400,
}  # fmt: skip
SLOTS, MEAN_S, CONNECTIONS, MODEL = 256, 0.2, 256, "small"


def load(url: str, seconds: float, mean_s: float, pids: dict[str, int]) -> dict[str, Any]:
    """Run the load client; return what it saw, with CPU in us a request by name."""
    command = [sys.executable, str(Path(__file__).with_name("clients.py")), url]
    words = [str(CONNECTIONS), str(seconds), str(mean_s), MODEL]
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
    seen: dict[str, Any] = json.loads(done.stdout)
    assert set(seen["statuses"]) == {"200"}, seen["statuses"]
    for name, pid in pids.items():
        seen[f"{name}_us"] = 1e6 * (cpu_s(pid) - before[name]) / seen["all"]
    return seen


@contextmanager
def bare_server() -> Iterator[tuple[str, int]]:
    """Run the bare server; yield its URL and process id."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("bare_server.py")), str(port)]
    process = subprocess.Popen(command)
    try:
        eventually(lambda: _listens(port), 20, "the bare server listens")
        yield f"http://127.0.0.1:{port}{CHAT_URL}", process.pid
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def direct(url: str, seconds: float) -> list[float]:
    """Return ms on top of each request's time in the engine, without HTTP."""
    settings = GatewaySettings(redis_url=url)
    redis = OnlineRequests.open(url, "bench-direct")
    waiting = PendingRequests(redis, settings)
    hearing = asyncio.create_task(waiting.run())
    drawn = Load("", "", seconds, MEAN_S, MODEL)
    queue = queue_name(MODEL, settings.queue)

    async def one() -> None:
        while time.monotonic() < drawn.ends:
            engine_s = drawn.draw()
            body = drawn.request(engine_s).partition(b"\r\n\r\n")[2]
            request_id = waiting.new_id()
            began = time.monotonic()
            message = write_online(
                request_id, CHAT_URL, body, queue=queue, priority=0, tenant="default",
                deadline=time.time() + 60, keep_ms=60_000,
            )  # fmt: skip
            push = Push(turn_list(queue, 0, "default"), request_id, None, message)
            waiter = await waiting.ask(push, listens=False)
            await waiter.ending
            waiting.leave(waiter)
            drawn.took(began, engine_s, 200)

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    hearing.cancel()
    await redis.close()
    return drawn.added_ms


def once(folder: Path, seconds: float) -> dict[str, float]:
    """Run each side once; return the figures."""
    with RedisServer(folder / "redis") as server, server.client() as client:
        worker = Worker(
            server.url, folder / "worker.log", engine="simulated", served_model_name=MODEL,
            simulated_slots=SLOTS, simulated_latency_s=MEAN_S,
        )  # fmt: skip
        with worker, GatewayProcess(server.url, folder) as gateway, bare_server() as bare:
            store = BatchStore(client, ttl_ms=60_000)
            eventually(lambda: any(w["state"] == "ready" for w in store.announcements()), 60)
            assert gateway.process is not None
            pids = {"gateway": gateway.process.pid, "worker": worker.pid}
            url = f"{gateway.url}{CHAT_URL}"
            load(url, 2, MEAN_S, pids)  # connections, scripts, caches
            redis_before = redis_cpu_s(client)
            seen = load(url, seconds, MEAN_S, pids)
            redis_us = 1e6 * (redis_cpu_s(client) - redis_before) / seen["all"]
            own = uvloop.run(direct(server.url, seconds))
            alone = load(bare[0], min(seconds, 3), 0, {"bare": bare[1]})
    figures = {
        "requests_s": seen["count"] / seen["seconds"],
        "occupancy": seen["engine_s"] / seen["seconds"] / SLOTS,
        "gateway_us": seen["gateway_us"],
        "bare_us": alone["bare_us"],
        "worker_us": seen["worker_us"],
        "redis_us": redis_us,
    }
    for share, label in ((0.5, "p50"), (0.99, "p99")):
        figures[f"added_ms_{label}"] = report.percentile(seen["added_ms"], share)
        figures[f"direct_ms_{label}"] = report.percentile(own, share)
        figures[f"over_direct_ms_{label}"] = (
            figures[f"added_ms_{label}"] - figures[f"direct_ms_{label}"]
        )
    return figures


def measure(quick: bool) -> dict[str, Any]:
    """Run all repeats; return the part's figures."""
    repeats, seconds = (1, 6.0) if quick else (5, 20.0)
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
            for key, value in once(Path(name), seconds).items():
                found.setdefault(key, []).append(value)
    return {
        "connections": CONNECTIONS,
        "slots": SLOTS,
        "mean_latency_s": MEAN_S,
        "reached": {name: report.spread(values, 3) for name, values in found.items()},
    }
