"""The gateway's page over 100,000 batches and 1,000 workers: each page's time, and Redis' CPU.

    .venv/bin/python tests/bench/gateway/page_many.py [BATCHES] [WORKERS]

Bars: each page is ready in 300 ms, and Redis spends less than 1 % of a core on a page that is open.
Batches are made by the calls that `producer submit` makes; of workers there are announcements and
rings alone, written as workers write them, but by one process.
Writes results/gateway_page_many.json.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import httpx
import orjson
import redis
from kit.gateways.gateway_process import GatewayProcess
from kit.protocol.lessee import QUEUE, submit_batch
from page import one_page, view

from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.history import DAY, HOUR
from contract.redis.scripts import source
from contract.version import PROTOCOL
from demo.stack import RedisServer

RESULT = Path(__file__).parents[1] / "results" / "gateway_page_many.json"
WINDOW_S, VIEWERS, PAIRS = 10.0, (1, 10), 3


def announced(number: int, completed: int) -> bytes:
    """Return what a worker says of itself, as large as a real one's."""
    return orjson.dumps({
        "state": "serving", "version": "0.9.0", "protocol": PROTOCOL, "queue": QUEUE,
        "model": "Qwen/Qwen3-8B", "in_flight": 240 + number % 17, "limit": 512, "slots": 256,
        "device": "NVIDIA H100 80GB HBM3", "deaths": number % 3, "kv_tokens": 412_304,
        "done": {"completed": completed, "other": 3, "prompt_tokens": completed * 210,
                 "completion_tokens": completed * 160, "cached_tokens": completed * 40,
                 "handed_back": 2},
        "mean_answer": 160.2, "mean_prompt": 210.9, "slots_full": 0.97,
    })  # fmt: skip


class Announcing(threading.Thread):
    """Writes all workers' announcements every second, until stopped."""

    def __init__(self, client: redis.Redis, workers: int) -> None:
        super().__init__(daemon=True)
        self._client, self._workers, self._end = client, workers, threading.Event()

    def run(self) -> None:
        """Write them."""
        second = 0
        while not self._end.wait(1.0 if second else 0.0):
            second += 1
            now = b"%d" % round(time.time() * 1000)
            said = {
                f"worker-{n:04d}@host-{n // 8}": now + b"\0" + announced(n, second * 60 + n)
                for n in range(self._workers)
            }
            self._client.hset(keys.WORKERS, mapping=said)

    def stop(self) -> None:
        """End it."""
        self._end.set()
        self.join()


def fill(client: redis.Redis, store: BatchStore, batches: int, workers: int) -> None:
    """Make the batches, and rings that are full."""
    for number in range(batches):
        submit_batch(store, 1, batch_id=f"batch-{number:06d}")
    note = client.register_script(source("ring"))
    minute = store.now_ms() // 60_000
    sums = "900 3 189000 144000 36000 15000 15360"
    day = {m % DAY: f"{m} {sums}" for m in range(minute - DAY + 1, minute)}
    client.hset(f"warmq:ring:{QUEUE}", mapping=day)
    for number in range(workers):
        name = f"worker-{number:04d}@host-{number // 8}"
        note(args=[QUEUE, name, 9, 0, 1890, 1440, 360, 150, 154])
        hour = {m % HOUR: f"{m} {sums}" for m in range(minute - HOUR + 1, minute)}
        client.hset(f"warmq:ring-of:{name}", mapping=hour)


def cpu_share(client: redis.Redis, seconds: float) -> float:
    """Return which share of a core Redis used in the next seconds."""

    def used() -> float:
        info: Any = client.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"])

    began, before = time.monotonic(), used()
    time.sleep(seconds)
    return (used() - before) / (time.monotonic() - began)


async def watched(client: redis.Redis, port: int, path_ids: str, viewers: int) -> float:
    """Return Redis' CPU with so many open pages."""
    done, told = asyncio.Event(), list[float]()
    looking = [asyncio.create_task(view(port, path_ids, told, done)) for _ in range(viewers)]
    await asyncio.sleep(2.0)
    share = await asyncio.to_thread(cpu_share, client, WINDOW_S)
    done.set()
    await asyncio.gather(*looking)
    return share


def pages(base: str, batches: int, workers: int) -> dict[str, dict[str, float]]:
    """Return the time and weight of each page."""
    paths = (
        "/ui", "/ui/batches", f"/ui/batches?after=batch-{batches // 2:06d}",
        f"/ui/batches/batch-{batches - 1:06d}", "/ui/workers",
        f"/ui/workers?page={max(1, workers // 100)}", "/ui/tenants", "/ui/dead", "/ui/submit",
    )  # fmt: skip
    return {path: one_page(base, path) for path in paths}


def main() -> None:
    """Measure all."""
    batches = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    found: dict[str, Any] = {"batches": batches, "workers": workers}
    with (
        tempfile.TemporaryDirectory() as name,
        RedisServer(Path(name) / "redis") as server,
        server.client() as client,
    ):
        began = time.monotonic()
        fill(client, BatchStore(client, ttl_ms=3_600_000), batches, workers)
        print(f"filled in {time.monotonic() - began:.0f} s", flush=True)
        announcing = Announcing(client, workers)
        announcing.start()
        with GatewayProcess(server.url, Path(name)) as gateway:
            began = time.monotonic()
            httpx.get(f"{gateway.url}/ui/batches", timeout=300).raise_for_status()
            found["first_look_at_all_batches_s"] = round(time.monotonic() - began, 2)
            found["pages"] = pages(gateway.url, batches, workers)
            newest = ",".join(f"batch-{batches - n:06d}" for n in range(1, 26))
            for count in VIEWERS:
                more = []
                for _ in range(PAIRS):
                    none = cpu_share(client, WINDOW_S)
                    some = asyncio.run(watched(client, gateway.port, newest, count))
                    more.append(some - none)
                found[f"redis_cpu_of_{count}_open"] = round(statistics.median(more), 4)
        announcing.stop()
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
