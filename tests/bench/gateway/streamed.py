"""Streamed chats of the real engine: through the gateway, and of `vllm serve` beside it.

Both engines have the same model and arguments and are warm; one works at a time, in turn, and the
processes of the other are stopped meanwhile (SIGSTOP): a waiting engine on a CPU is not idle.
Client, gateway, worker with its engine, and Redis share this machine; so do client and vLLM's
server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.common import report
from kit.gateways.gateway_process import GatewayProcess
from kit.servers.vllm_server import KEY, VllmServer

from contract.openai.body import CHAT_URL
from contract.redis.batches import BatchStore
from demo.stack import (
    CPU_ENGINE_ARGS,
    GPU_ENGINE_ARGS,
    MODEL,
    RedisServer,
    eventually,
    on_gpu,
    tiny_model_worker,
)

AT_ONCE, TOKENS = 32, 128
TITLE = "streamed chats through the gateway beside vLLM's own server"
EXPECTED = {
    "written": "before the first run of this form",
    "tokens_to_vllm": 1.0,
    "first_ms_more_p50": 5,
    "why": "vLLM's server writes an event a token, the gateway one for what 20 ms brought",
}
BARS = {"tokens_to_vllm": 0.95, "first_ms_more_p50": 10}


def engine_args() -> str:
    """Return what both engines are started with on this machine."""
    return GPU_ENGINE_ARGS if on_gpu() else CPU_ENGINE_ARGS


def asked(url: str, model: str, count: int) -> dict[str, float]:
    """Run the client against one server; return tokens/s and ms to the first text."""
    client = str(Path(__file__).with_name("stream_client.py"))
    words = [url, KEY, model, *map(str, (AT_ONCE, count, TOKENS))]
    done = subprocess.run(
        [sys.executable, client, *words], stdout=subprocess.PIPE, text=True, check=True
    )
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["tokens"] == count * TOKENS, seen["tokens"]
    return {
        "tokens_per_s": seen["tokens"] / seen["seconds"],
        "first_ms_p50": report.percentile(seen["first_ms"], 0.5),
        "first_ms_p99": report.percentile(seen["first_ms"], 0.99),
    }


@contextmanager
def stopped(process: subprocess.Popen[bytes] | None) -> Iterator[None]:
    """Stop a server with its engine for a while; it leads a process group of its own."""
    assert process is not None
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGCONT)


def _serves(url: str) -> bool:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20) as said:
            return bool(said.status == 200)
    except OSError:  # its worker has not announced itself since it goes on
        return False


@contextmanager
def both(folder: Path) -> Iterator[dict[str, tuple[str, str, Any]]]:
    """Yield URL, model and the process that is to be stopped, of each side."""
    vllm = VllmServer(folder / "vllm.log", keep_alive_s=75, engine_args=engine_args())
    worker_log = folder / "worker.log"
    with (
        RedisServer(folder / "redis") as server,
        server.client() as client,
        tiny_model_worker(server.url, worker_log) as worker,
        GatewayProcess(server.url, folder) as gateway,
    ):
        store = BatchStore(client, ttl_ms=60_000)
        eventually(lambda: any(w["state"] == "ready" for w in store.announcements()), 120)
        with urllib.request.urlopen(f"{gateway.url}/v1/models") as answer:
            (model,) = [one["id"] for one in json.load(answer)["data"]]
        try:
            vllm.start()
            yield {
                "gateway": (f"{gateway.url}{CHAT_URL}", model, vllm.process),
                "vllm": (f"{vllm.root}{CHAT_URL}", str(MODEL), worker.process),
            }
        finally:
            vllm.kill()


def measure(quick: bool) -> dict[str, Any]:
    """Run all rounds; return the part's figures."""
    rounds, count = (2, 128) if quick else (10, 256)
    runs = []
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name, both(Path(name)) as sides:
        for number in range(rounds):
            turn = {}
            for side in list(sides)[:: 1 if number % 2 else -1]:
                url, model, other = sides[side]
                with stopped(other):
                    eventually(lambda url=url: _serves(url), 30, "it is awake")
                    asked(url, model, AT_ONCE)  # until all of this side is awake
                    turn[side] = asked(url, model, count)
            runs.append(turn)
    return {
        "at_once": AT_ONCE, "requests": count, "tokens_each": TOKENS,
        "engine_args": engine_args(),
        "reached": reached(runs),
    }  # fmt: skip


def reached(runs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return each side's figures, and what they are to each other by round."""
    found = {
        f"{side}_{figure}": report.spread([turn[side][figure] for turn in runs], 1)
        for side in runs[0]
        for figure in runs[0][side]
    }
    ratios = [turn["gateway"]["tokens_per_s"] / turn["vllm"]["tokens_per_s"] for turn in runs]
    more = [turn["gateway"]["first_ms_p50"] - turn["vllm"]["first_ms_p50"] for turn in runs]
    return found | {
        "tokens_to_vllm": report.spread(ratios, 3),
        "first_ms_more_p50": report.spread(more, 1),
    }
