"""warmq against what a user would pick instead, on one GPU: the same file, engines all warm.

    instead.py --out FILE [--shape 8b] [--rounds 4] [--requests 850] [--seconds 450]

queue       the real worker process, from the release of a batch that waits in Redis
client 256  aiohttp with so many connections against `vllm serve`; also 320 and 512
celery      a stock worker with 320 threads in front of its own AsyncLLMEngine
one by one  the same server, one request after another, over the first few requests
run-batch   `vllm run-batch`: a process, and an engine, for every file

Each has an engine of its own of the same arguments; only one works at a time. Every request is
a chat; the model's template hands its text over as it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

import aiohttp
from bench.common import report
from bench.common.load import hold, is_ready
from bench.common.process import Process, span_drawn, well
from bench.gpu import pairs, workload
from bench.gpu.record import Record, options
from celery import Celery

from contract.openai.body import CHAT_URL
from contract.redis import keys
from demo.stack import RedisServer, eventually, free_port, procfile_command

THREADS = 320
ONE_BY_ONE = 15
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def chat(request: tuple[str, int]) -> dict[str, Any]:
    """Return a request as a chat: greedy, of exactly so many tokens."""
    prompt, tokens = request
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


class Field:
    """All that run, and the requests."""

    def __init__(self, folder: Path, redis_server: RedisServer, model: Path, count: int) -> None:
        self.folder, self.redis, self.model = folder, redis_server, model
        self.wanted = workload.requests(count)
        self.tokens = sum(tokens for _, tokens in self.wanted)
        self.options = pairs.as_options(pairs.ENGINE | {
            "max_num_seqs": 256, "kv_cache_memory_bytes": 20 * pairs.GIB,
        })  # fmt: skip
        self.port = free_port()
        self.runs = 0

    def start(self, stack: ExitStack) -> None:
        """Start the warm ones at once and wait for all; compile caches apart."""
        python, model = sys.executable, str(self.model)
        path = os.pathsep.join(
            [str(pairs.HERE.parent / "peers" / "programs"), os.environ.get("PYTHONPATH", "")]
        )
        cache = os.environ.get("VLLM_CACHE_ROOT", str(self.folder / "cache"))
        self.worker = Process(
            self.folder / "worker.log", procfile_command(), WARMQ_REDIS_URL=self.redis.url,
            WARMQ_MODEL=model, WARMQ_ENGINE_ARGS=self.options,
        )  # fmt: skip
        self.server = Process(
            self.folder / "server.log",
            [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
             "--port", str(self.port), *shlex.split(self.options)],
            VLLM_CACHE_ROOT=cache + "-server",
        )  # fmt: skip
        broker = self.redis.url.removesuffix("/0") + "/1"
        self.stock = Celery("stock", broker=broker, backend=broker)
        self.celery = Process(
            self.folder / "celery.log",
            [str(Path(python).parent / "celery"), "-A", "stock_celery", "worker",
             "--pool=threads", f"--concurrency={THREADS}", "--without-gossip",
             "--without-mingle", "--loglevel=WARNING"],
            STOCK_REDIS_URL=broker, STOCK_MODEL=model, STOCK_ARGS=self.options, PYTHONPATH=path,
            VLLM_CACHE_ROOT=cache + "-celery",
        )  # fmt: skip
        for process in (self.worker, self.server, self.celery):
            stack.callback(process.stop)
        eventually(self._ready, 500, "all engines are ready", 1.0)

    def _ready(self) -> bool:
        for process in (self.worker, self.server, self.celery):
            process.check()
        with self.redis.client() as client:
            drains = is_ready(client)
        serves = well(f"http://127.0.0.1:{self.port}")
        return drains and serves and bool(self.stock.control.ping(timeout=1))

    def time(self, form: str) -> dict[str, Any]:
        """Run all requests (of `one by one`, the first few) one way."""
        self.runs += 1
        if form == "queue":
            seconds, tokens = self._queue(), self.tokens
        elif form == "celery":
            seconds, tokens = self._celery(), self.tokens
        else:
            alone = form == "one by one"
            wanted = self.wanted[:ONE_BY_ONE] if alone else self.wanted
            at_once = 1 if alone else int(form.split()[1])
            seconds = asyncio.run(self._client(wanted, at_once))
            tokens = sum(length for _, length in wanted)
        found = {"form": form, "seconds": seconds, "tokens_per_s": tokens / seconds}
        print(json.dumps(found), flush=True)
        return found

    def _queue(self) -> float:
        with self.redis.client() as client:
            count = len(self.wanted)
            held = hold(
                client, f"gpu{self.runs}", count, lambda n: chat(self.wanted[n - 1]), url=CHAT_URL
            )
            began = held.release()
            seconds = held.wait(200) - began
            ended = client.hgetall(keys.batch_key(held.batch.id))
            client.flushdb()
        assert int(ended[b"completed"]) == count, ended
        assert int(ended[b"completion_tokens"]) == self.tokens, ended
        return seconds

    def _celery(self) -> float:
        began = time.perf_counter()
        with self.stock.pool.acquire(block=True) as connection:
            sent = [
                self.stock.send_task(
                    "stock.generate", (chat(request),), connection=connection, ignore_result=False
                )
                for request in self.wanted
            ]
        answers = [result.get(timeout=200, interval=0.05) for result in sent]
        assert [a["tokens"] for a in answers] == [tokens for _, tokens in self.wanted]
        return time.perf_counter() - began

    async def _client(self, wanted: list[tuple[str, int]], at_once: int) -> float:
        left = list(wanted)[::-1]
        url = f"http://127.0.0.1:{self.port}{CHAT_URL}"
        connector = aiohttp.TCPConnector(limit=at_once)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def keep_going() -> None:
                while left:
                    request = left.pop()
                    async with session.post(url, json=chat(request)) as answer:
                        body = await answer.json()
                    assert body["usage"]["completion_tokens"] == request[1], body

            began = time.perf_counter()
            await asyncio.gather(*(keep_going() for _ in range(at_once)))
            return time.perf_counter() - began

    def run_batch(self, number: int) -> dict[str, Any]:
        """Run the file through `vllm run-batch`; its bar's first and last sign bound the rate."""
        given, answers = self.folder / "in.jsonl", self.folder / f"out{number}.jsonl"
        given.write_text("".join(
            json.dumps({"custom_id": str(n), "method": "POST", "url": CHAT_URL,
                        "body": chat(request) | {"model": str(self.model)}}) + "\n"
            for n, request in enumerate(self.wanted)
        ))  # fmt: skip
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(given),
             "-o", str(answers), "--model", str(self.model), *shlex.split(self.options)],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        spent = span_drawn(process, b"Running batch", self.folder / "run-batch.log")
        process.wait(60)
        wall = time.monotonic() - began
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
        tokens = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines)
        assert tokens == self.tokens, (len(lines), tokens)
        found = {"form": "run-batch", "seconds": wall, "tokens_per_s": self.tokens / spent}
        print(json.dumps(found), flush=True)
        return found


@contextmanager
def started(shape: str, count: int) -> Iterator[tuple[Field, ExitStack]]:
    """Start Redis and all that stays warm."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmq-gpu-")))
        server = stack.enter_context(RedisServer(folder))
        model = workload.write_model(folder / f"llama-{shape}", shape)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        warm = stack.enter_context(ExitStack())
        field = Field(folder, server, model, count)
        field.start(warm)
        yield field, warm


def reached(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return rates, and warmq's over each of them in its round."""
    found: dict[str, Any] = {}
    for form in rounds[0] if rounds else ():
        rates = [turn[form]["tokens_per_s"] for turn in rounds if form in turn]
        found[f"{form}_tokens_per_s"] = report.spread(rates, 0)
        if form != "queue":
            ratios = [turn["queue"]["tokens_per_s"] / turn[form]["tokens_per_s"]
                      for turn in rounds if form in turn and "queue" in turn]  # fmt: skip
            found[f"queue_to_{form}"] = report.spread(ratios, 4)
    return found


def main() -> None:
    """Measure; write what there is after every round."""
    parser = options(__doc__ or "", seconds=450)
    parser.add_argument("--requests", type=int, default=850)
    parser.add_argument("--run-batches", type=int, default=2)
    chosen = parser.parse_args()
    begin = time.monotonic()
    forms = ["queue", "client 256", "client 320", "client 512", "celery"]
    rounds: list[dict[str, dict[str, Any]]] = []
    with started(chosen.shape, chosen.requests) as (field, warm):
        record = Record(
            chosen, begin, engine=field.options, requests=chosen.requests, tokens=field.tokens
        )
        for form in ("queue", "client 320", "celery"):
            field.time(form)  # warms it up, and is not counted
        record.keep(one_by_one=field.time("one by one") | {"requests": ONE_BY_ONE})
        for number in range(chosen.rounds):
            if time.monotonic() - begin > chosen.seconds - 70 * chosen.run_batches:
                break
            rounds.append({form: field.time(form) for form in report.in_turn(forms, number)})
            record.keep(reached=reached(rounds))
        warm.close()
        run_batch: list[dict[str, Any]] = []
        for number in range(chosen.run_batches):
            if time.monotonic() - begin > chosen.seconds:
                break
            run_batch.append(field.run_batch(number))
            record.keep(run_batch=run_batch)
    print(json.dumps(reached(rounds)))


if __name__ == "__main__":
    main()
