"""The gateway's page: how long a batch of a million lines takes, what it weighs, what viewers cost.

    .venv/bin/python tests/bench/gateway/page.py [LINES] [PAIRS]

Bars: the page of a batch of 1,000,000 lines is ready in 300 ms of server time and weighs 300 kB
uncached; with 50 viewers the engine's slots are as full and answers come as fast as with none
(0.99), pairs in turn; Redis spends less than 1 % of a core on viewers.
Writes results/gateway_page.json.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import httpx
import orjson
from kit.commands.support import producer_command, producer_env
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import simulated

from contract.redis.batches import BatchStore
from contract.redis.reads import Reads
from demo.stack import RedisServer, eventually

RESULT = Path(__file__).parents[1] / "results" / "gateway_page.json"
VIEWERS, WINDOW_S, SLOTS, LATENCY_S = 50, 12.0, 64, 0.2


def write_lines(path: Path, count: int) -> None:
    """Write a file of so many chats."""
    with path.open("wb") as file:
        for number in range(count):
            body = {"messages": [{"role": "user", "content": f"What is {number} + 1?"}]}
            file.write(orjson.dumps({
                "custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions",
                "body": body,
            }) + b"\n")  # fmt: skip


def submit(url: str, file: Path, batch_id: str) -> float:
    """Queue a file; return the seconds it took."""
    began = time.monotonic()
    command = producer_command("submit", file, "--batch-id", batch_id)
    subprocess.run(command, env=producer_env(url), check=True, capture_output=True)
    return time.monotonic() - began


def one_page(base: str, path: str, times: int = 20) -> dict[str, float]:
    """Return how long a page takes at the server, as a client beside it sees it, and its weight."""
    with httpx.Client(base_url=base) as client:
        html = client.get(path).text
        names = set(re.findall(r'(?:src|href)="(/ui/assets/[^"]+)"', html))
        modules = {re.sub(r"[^/]+$", "live.js", name) for name in names}
        weight = len(html.encode()) + sum(len(client.get(n).content) for n in names | modules)
        took = []
        for _ in range(times):
            began = time.perf_counter()
            client.get(path).raise_for_status()
            took.append((time.perf_counter() - began) * 1000)
    return {"median_ms": round(statistics.median(took), 1), "most_ms": round(max(took), 1),
            "weight_bytes": weight}  # fmt: skip


async def view(port: int, batch_id: str, told: list[float], done: asyncio.Event) -> None:
    """Read one stream until `done`; note when each event of a batch came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /ui/live?batches={batch_id} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    reading = asyncio.create_task(_read(reader, told))
    await done.wait()
    reading.cancel()
    writer.close()


async def _read(reader: asyncio.StreamReader, told: list[float]) -> None:
    while line := await reader.readline():
        if line.startswith(b"event: batch"):
            told.append(time.monotonic())


class Measured:
    """Answers, slots and Redis' CPU over a window."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._client = Reads.using(store)

    def _now(self) -> tuple[float, int, float]:
        (worker,) = self._client.announcements()
        info = self._client.info()
        cpu = info["used_cpu_user"] + info["used_cpu_sys"]
        return time.monotonic(), worker["done"]["completed"], cpu

    async def window(self, seconds: float) -> dict[str, float]:
        """Look for so long; the load goes on meanwhile."""
        began, before, cpu = self._now()
        fills = []
        while time.monotonic() - began < seconds:
            await asyncio.sleep(0.5)
            (worker,) = self._client.announcements()
            fills.append(min(worker["in_flight"], SLOTS) / SLOTS)
        ended, after, cpu_after = self._now()
        took = ended - began
        return {"answers_s": (after - before) / took, "fill": statistics.mean(fills),
                "redis_cpu": (cpu_after - cpu) / took}  # fmt: skip


async def viewers(store: BatchStore, port: int, batch_id: str, pairs: int) -> dict[str, Any]:
    """Return windows without and with viewers, in turn."""
    measured, rows = Measured(store), []
    for pair in range(pairs):
        row: dict[str, Any] = {}
        for kind in ("none", "viewers") if pair % 2 == 0 else ("viewers", "none"):
            done, told = asyncio.Event(), list[float]()
            count = VIEWERS if kind == "viewers" else 0
            looking = [asyncio.create_task(view(port, batch_id, told, done)) for _ in range(count)]
            await asyncio.sleep(1.0)
            row[kind] = await measured.window(WINDOW_S)
            done.set()
            await asyncio.gather(*looking)
            row[kind]["events"] = len(told)
        rows.append(row)
    return {
        "pairs": rows,
        "answers_ratio": statistics.median(
            row["viewers"]["answers_s"] / row["none"]["answers_s"] for row in rows
        ),
        "fill_ratio": statistics.median(
            row["viewers"]["fill"] / row["none"]["fill"] for row in rows
        ),
        "redis_cpu_more": statistics.median(
            row["viewers"]["redis_cpu"] - row["none"]["redis_cpu"] for row in rows
        ),
    }


def main() -> None:
    """Measure all."""
    lines = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    pairs = int(sys.argv[2]) if len(sys.argv) > 2 else 6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RedisServer(folder / "redis") as server, server.client() as client:
            store = BatchStore(client, ttl_ms=600_000)
            with GatewayProcess(server.url, folder) as gateway:
                write_lines(folder / "many.jsonl", lines)
                took = submit(server.url, folder / "many.jsonl", "many")
                print(f"{lines:,} lines queued in {took:.0f} s", flush=True)
                found: dict[str, Any] = {"lines": lines, "waiting": {}}
                for path in ("/ui", "/ui/batches", "/ui/batches/many"):
                    found["waiting"][path] = one_page(gateway.url, path)
                worker = simulated(
                    server.url, folder / "worker.log", simulated_slots=SLOTS,
                    simulated_latency_s=LATENCY_S,
                )  # fmt: skip
                worker.start()
                try:
                    eventually(lambda: (b := store.batch("many")) and b.terminal > 5000, 120)
                    found["running"] = {
                        "/ui/batches/many": one_page(gateway.url, "/ui/batches/many")
                    }
                    found["viewers"] = asyncio.run(viewers(store, gateway.port, "many", pairs))
                finally:
                    worker.kill()
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(
        json.dumps(found | {"viewers": {k: v for k, v in found["viewers"].items() if k != "pairs"}})
    )


if __name__ == "__main__":
    main()
