"""Online chats while a large batch is queued, and while nothing else is: how long they take.

Processes of their own: gateway, drain over the simulated engine, Redis. This one sends chats at a
steady rate whether or not the last ones were answered; each takes as long in the engine as any
other, so that what differs is their wait.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from bench.common import report
from bench.common.load import Held, hold, wait_ready
from bench.common.probe import Probe
from kit.gateways.gateway_process import GatewayProcess

from contract.openai.body import CHAT_URL
from demo.stack import RedisServer

TITLE = "online chats beside a batch, and alone"
EXPECTED = {
    "written": "before the first run",
    "p99_to_idle": 1.2,
    "occupancy": 0.985,
    "why": "a chat waits for the look-ahead that stands before it in the engine, some 20 ms of 200",
}
BARS = {"p99_to_idle": 1.5, "occupancy": 0.98}
SLOTS, MEAN_S, RATE = 256, 0.2, 10
#: Chats end so many seconds before the batch may; the first ones are not counted.
SETTLE_S, FIRST = 5.0, 20


async def asked(url: str, model: str, seconds: float) -> list[float]:
    """Send chats at RATE for so long; return the ms that each took but for the first ones, which
    open connections and fill caches."""
    took: list[float] = []
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "x" * 500}],
        "user": f"simulate:sleep={MEAN_S}",
    }

    async with httpx.AsyncClient(timeout=60) as client:

        async def one(number: int) -> None:
            began = time.monotonic()
            answer = await client.post(f"{url}{CHAT_URL}", json=body)
            if number >= FIRST:
                took.append(1000 * (time.monotonic() - began))
            assert answer.status_code == 200, answer.text

        async with asyncio.TaskGroup() as all_of_them:
            began = time.monotonic()
            for number in range(int(seconds * RATE)):
                await asyncio.sleep(began + number / RATE - time.monotonic())
                all_of_them.create_task(one(number))
    return took


def phase(folder: Path, count: int, seconds: float) -> tuple[list[float], dict[str, Any]]:
    """Run chats for so long, beside a batch of `count` requests if that is not 0.

    Returns the ms that each took, and what the drain saw.
    """
    folder.mkdir()
    settings = {"simulated_slots": SLOTS, "simulated_latency_s": MEAN_S}
    with RedisServer(folder / "redis") as server, server.client() as client:
        batch: Held | None = hold(client, "beside", count) if count else None
        probe = Probe(server.url, folder / "seen.json", **settings)
        with GatewayProcess(server.url, folder) as gateway, probe:
            wait_ready(client)
            models = httpx.get(f"{gateway.url}/v1/models").json()["data"]
            model = models[0]["id"]
            if batch is not None:
                began = batch.release()
            took = asyncio.run(asked(gateway.url, model, seconds))
            if batch is not None:
                assert batch.finished_at() is None, "the batch ended before the chats did"
                ended = batch.wait(count / SLOTS * MEAN_S * 2 + 60)
                probe_s = ended - began
    seen = probe.seen
    return took, seen | ({"batch_s": probe_s} if batch is not None else {})


def measure(quick: bool) -> dict[str, Any]:
    """Run all rounds, in turn; return the part's figures."""
    rounds, count = (1, 20_000) if quick else (3, 100_000)
    seconds = count / SLOTS * MEAN_S - SETTLE_S
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
            sides = {}
            for side in ("idle", "beside")[:: 1 if number % 2 else -1]:
                requests = count if side == "beside" else 0
                sides[side] = phase(Path(name) / side, requests, seconds)
        for side, (took, _) in sides.items():
            for share, label in ((0.5, "p50"), (0.99, "p99")):
                figure = report.percentile(took, share)
                found.setdefault(f"{side}_ms_{label}", []).append(figure)
        found.setdefault("p99_to_idle", []).append(
            found["beside_ms_p99"][-1] / found["idle_ms_p99"][-1]
        )
        seen = sides["beside"][1]
        found.setdefault("occupancy", []).append(seen["occupancy"])
        found.setdefault("batch_per_s", []).append(count / seen["batch_s"])
    return {
        "batch": count, "chats_per_s": RATE, "slots": SLOTS, "latency_s": MEAN_S,
        "reached": {name: report.spread(values, 3) for name, values in found.items()},
    }  # fmt: skip
