"""Tokens per second through the queue while 0, 1 or 16 listeners read the text of what runs.

One process with a real vLLM engine (forms.py); the listeners are threads of another process, each
following one request after another through the batch. Rounds take turns.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import orjson
import redis
from bench.beside_vllm.forms import TOKENS, Forms, warm_engine
from bench.common import report

from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.streaming import Listener
from demo.stack import CPU_ENGINE_ARGS

LISTENERS = (0, 1, 16)
TITLE = "tokens/s with listeners over tokens/s without"
EXPECTED = {
    "written": "before the first run",
    "1_to_0": 1.0,
    "16_to_0": 0.98,
    "why": "a tick, every 20 ms at most, reads 16 texts and sends 16 commands in one round trip",
}
BARS = {"1_to_0": 0.98, "16_to_0": 0.95}


def follow(url: str, request_ids: list[str], heard: list[int]) -> None:
    """Read the text of one request after another; append how many characters came."""
    client = redis.Redis.from_url(url)
    store = BatchStore(client, ttl_ms=1000)
    for request_id in request_ids:
        listener = Listener(client, [request_id])
        transcript = listener.transcripts[request_id]
        # Without batches the measurement has ended.
        while (
            not transcript.ended
            and store.results([request_id]) == [None]
            and client.exists(keys.BATCHES)
        ):
            listener.read(0.2)
        listener.close()
        heard.append(len(transcript.texts.get(0, "")))


def listeners(url: str, count: int, request_ids: list[str]) -> None:
    """Follow with so many threads; print how many requests' text came."""
    heard: list[int] = []
    threads = [
        threading.Thread(target=follow, args=(url, request_ids[n::count], heard))
        for n in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(characters > 0 for characters in heard))


async def timed(forms: Forms, count: int, readers: int) -> dict[str, Any]:
    """Run `count` requests through the queue with so many readers."""
    process: subprocess.Popen[bytes] | None = None

    def begin(url: str, request_ids: list[str]) -> None:
        nonlocal process
        process = subprocess.Popen(
            [sys.executable, __file__, url, str(readers)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(orjson.dumps(request_ids))
        process.stdin.close()

    found = await forms.time("queue", count, beside=begin if readers else None)
    text_of = 0
    if process is not None:
        assert process.stdout is not None
        text_of = int(await asyncio.to_thread(process.stdout.read))
        await asyncio.to_thread(process.wait)
    return found | {"listeners": readers, "requests_with_text": text_of}


async def measure(quick: bool, model: Path) -> dict[str, Any]:
    """Run all rounds; return the part's figures."""
    count, rounds = (150, 2) if quick else (500, 7)
    runs: list[list[dict[str, Any]]] = []
    async with warm_engine(model) as forms:
        await forms.time("queue", count)  # warms caches and the first compilations
        for number in range(rounds):
            order = report.in_turn(LISTENERS, number)
            runs.append([await timed(forms, count, readers) for readers in order])
    texts = [run["requests_with_text"] for turn in runs for run in turn]
    print(f"requests whose text was read, by run: {texts}")
    by_readers = [{run["listeners"]: run["tokens_per_s"] for run in turn} for turn in runs]
    return {
        "model": model.name, "requests": count, "tokens_each": TOKENS,
        "engine_args": CPU_ENGINE_ARGS,
        "reached": {
            f"{n}_to_0": report.spread([turn[n] / turn[0] for turn in by_readers])
            for n in LISTENERS[1:]
        },
    }  # fmt: skip


if __name__ == "__main__":
    listeners(sys.argv[1], int(sys.argv[2]), orjson.loads(sys.stdin.buffer.read()))
