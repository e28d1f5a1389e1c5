"""Ways to take a file of chats through one vLLM: what they share, run-batch, and an HTTP client.

Every way answers the same chats with the same engine arguments and says for each run
`tokens_per_s` (while generating) and `wall_s` (what the user waits for the whole file).
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import aiohttp
from bench.common.process import span_drawn
from kit.servers.vllm_server import KEY, VllmServer

from contract.openai.body import CHAT_URL
from demo.stack import CPU_ENGINE_ARGS, MODEL, ROOT

TOKENS = 64
#: What differs between vLLM's front ends by default is fixed. Without prefix caching a warm
#: engine is not ahead of one that has just started.
MORE_ARGS = ("--max-num-batched-tokens", "4096", "--no-enable-prefix-caching")
ENGINE_ARGS = f"{CPU_ENGINE_ARGS} {shlex.join(MORE_ARGS)}"
#: ENGINE_ARGS as keyword arguments.
ENGINE_KEYWORDS: dict[str, Any] = {
    "max_num_seqs": 32, "max_model_len": 1024, "dtype": "float32", "enforce_eager": True,
    "kv_cache_memory_bytes": 268435456, "gpu_memory_utilization": 0.2,
    "max_num_batched_tokens": 4096, "enable_prefix_caching": False,
}  # fmt: skip
ENGINE_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
#: Where programs of this folder and of `programs/` find what they import.
PYTHONPATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
Found = dict[str, float]


class Way(Protocol):
    """One way; between `start` and `stop` it keeps what it can keep warm."""

    name: str
    #: Its engine stays between files.
    warm: bool

    def start(self) -> None:
        """Return when it is ready."""

    def run(self, count: int) -> Found:
        """Answer `count` chats."""

    def stop(self) -> None:
        """End all processes."""


def body(number: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Return one chat: greedy, of exactly so many tokens."""
    text = f"Question number {number}: what is the first letter of the alphabet?"
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip


def write_file(path: Path, count: int, tokens: int = TOKENS) -> Path:
    """Write the OpenAI batch file of `count` chats."""
    lines = (
        {"custom_id": f"r{n}", "method": "POST", "url": CHAT_URL, "body": body(n, tokens)}
        for n in range(count)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check_file(path: Path, count: int, tokens: int = TOKENS) -> None:
    """Refuse an output file that does not have every answer at its full length."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lengths = [line["response"]["body"]["usage"]["completion_tokens"] for line in lines]
    assert lengths == [tokens] * count, f"{len(lengths)} answers of {count}, or of other lengths"


def end(process: subprocess.Popen[Any] | None, grace_s: float = 30) -> None:
    """SIGTERM, then SIGKILL for the process's group if that was not enough."""
    if process is None:
        return
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


class RunBatch:
    """`vllm run-batch`: an engine for each file. The rate is of the span of its progress bar."""

    name, warm = "vllm run-batch", False

    def __init__(self, folder: Path, overlay: Path | None = None) -> None:
        """Prepare; `overlay` is a folder with another release of vLLM, which comes first."""
        self._folder = folder
        self._env = {"PYTHONPATH": str(overlay)} if overlay else {}

    def start(self) -> None:
        """Nothing stays between two files."""

    def run(self, count: int, tokens: int = TOKENS) -> Found:
        """Start it for one file and wait for its end."""
        folder = self._folder
        given = write_file(folder / f"in-{count}-{tokens}.jsonl", count, tokens)
        answers = folder / "run-batch.jsonl"
        began = time.monotonic()
        process = subprocess.Popen(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(given),
                "-o", str(answers), "--model", str(MODEL), *shlex.split(ENGINE_ARGS),
            ],
            cwd=ROOT, env=os.environ | ENGINE_ENV | self._env, stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        seconds = span_drawn(process, b"Running batch", folder / "run-batch.log")
        assert process.wait(60) == 0, f"run-batch failed: {folder / 'run-batch.log'}"
        wall = time.monotonic() - began
        check_file(answers, count, tokens)
        return {"tokens_per_s": count * tokens / seconds, "wall_s": wall}

    def stop(self) -> None:
        """Nothing is left."""


class Client:
    """An aiohttp client that keeps `at_once` requests open against `vllm serve`."""

    warm = True

    def __init__(self, server: VllmServer, at_once: int) -> None:
        self._server = server
        self._at_once = at_once
        self.name = f"aiohttp, {at_once} at once, against vllm serve"

    def start(self) -> None:
        """The server runs already."""

    def run(self, count: int) -> Found:
        """Ask `count` chats and read the answers."""
        began = time.monotonic()
        asyncio.run(self._ask(count))
        seconds = time.monotonic() - began
        return {"tokens_per_s": count * TOKENS / seconds, "wall_s": seconds}

    async def _ask(self, count: int) -> None:
        numbers = iter(range(count))
        url = self._server.url + "/chat/completions"

        async def one_after_another(session: aiohttp.ClientSession) -> None:
            for number in numbers:
                asked = body(number) | {"model": str(MODEL)}
                async with session.post(url, json=asked) as response:
                    answer = await response.json()
                    assert answer["usage"]["completion_tokens"] == TOKENS, answer

        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=256), headers={"Authorization": f"Bearer {KEY}"},
            timeout=aiohttp.ClientTimeout(None),
        ) as session:  # fmt: skip
            await asyncio.gather(*(one_after_another(session) for _ in range(self._at_once)))

    def stop(self) -> None:
        """The server is stopped by whoever started it."""
