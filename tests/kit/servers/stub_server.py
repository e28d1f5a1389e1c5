"""An OpenAI-compatible server without a model, over real sockets, in this process or its own.

Its answers carry the digest of their prompt, as the simulated engine's do. A request scripts its
own fate through `user`: `stub:status=500`, `stub:status=429,retry_after=1`, each with `,times=2`
(that often, then it is answered), `stub:hang`, `stub:cut` (the connection, mid-answer),
`stub:die` (the process), `stub:error=500` (inside the stream), `stub:seconds=3`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any, Self

import orjson
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from contract.openai.body import GENERATING
from demo.stack import eventually, free_port
from worker.engine.simulated.engine import digest

CHUNKS = 4
#: The error text of vLLM's QueueOverflowError.
FULL = (
    "The engine is currently busy and cannot accept new requests. "
    "Please try again later or on a different instance."
)


class StubServer:
    """Answers up to `slots` requests at once, the others wait; `vllm`: with its metrics."""

    def __init__(
        self,
        slots: int = 64,
        latency_s: float = 0.0,
        key: str = "",
        vllm: bool = True,
        log: Path | None = None,
        model: str = "stub",
    ) -> None:
        self.latency_s, self.key, self.vllm, self.model = latency_s, key, vllm, model
        #: What its list of models says of the model's longest sequence.
        self.length: object = 4096
        self.port = free_port()
        self.slots = slots
        self.running = self.waiting = self.most = self.tokens = 0
        #: The ids of all requests, and of those that asked for a stream.
        self.came: list[str] = []
        self.streamed: set[str] = set()
        self.left: list[str] = []
        self.held = asyncio.Event()
        self.held.set()
        self.times: Counter[str] = Counter()
        #: The `priority` of each request, by its id. Without the policy, any but 0 is refused.
        self.priorities: dict[str, int] = {}
        self.has_policy = self.has_metrics = True
        #: vLLM's --max-num-queued-reqs, and how many requests it refused.
        self.max_queued: int | None = None
        self.refused = 0
        #: Seconds before the first token, after a slot is free; seconds between tokens.
        self.first_s = 0.0
        self.gaps = self.gaps_s = 0.0
        self.finished = 0
        self._log = log
        self._free = asyncio.Semaphore(slots)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen on its port, which stays the same."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        for url in (*("/v1/embeddings", "/v1/score", "/rerank"), *OTHER_ANSWERS):
            app.router.add_post(url, self._generate)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01
        )
        await self._runner.setup()
        await web.TCPSite(
            self._runner, "127.0.0.1", self.port, backlog=1024, reuse_address=True
        ).start()

    async def stop(self) -> None:
        """Close every connection and listen no more."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # -- what it serves ---------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        if not self.vllm:
            return web.Response(status=404)
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        if not (self.vllm and self.has_metrics):
            return web.Response(status=404)
        names = {
            "num_requests_running": self.running, "num_requests_waiting": self.waiting,
            "kv_cache_usage_perc": 0.5, "generation_tokens_total": self.tokens,
            "inter_token_latency_seconds_count": self.gaps,
            "inter_token_latency_seconds_sum": self.gaps_s, "request_success_total": self.finished,
        }  # fmt: skip
        lines = (f'vllm:{n}{{engine="0",model_name="stub"}} {float(v)}' for n, v in names.items())
        return web.Response(text="\n".join(lines) + "\n")

    async def _models(self, request: web.Request) -> web.Response:
        if self._locked(request):
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        owner = "vllm" if self.vllm else "stub"
        model = {"id": self.model, "object": "model", "owned_by": owner}
        model["max_model_len"] = self.length
        return web.json_response({"object": "list", "data": [model]})

    def _locked(self, request: web.Request) -> bool:
        return bool(self.key) and request.headers.get("Authorization") != f"Bearer {self.key}"

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        rid = request.headers.get("X-Request-Id", "?")
        if self._locked(request):
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        body = orjson.loads(await request.read())
        self.came.append(rid)
        if body.get("stream"):
            self.streamed.add(rid)
        try:
            return await self._respond(request, rid, body)
        except (asyncio.CancelledError, ConnectionError):
            self.left.append(rid)
            raise asyncio.CancelledError from None  # aiohttp logs what else is raised

    async def _respond(
        self, request: web.Request, rid: str, body: dict[str, Any]
    ) -> web.StreamResponse:
        fate = self._fate(rid, body)
        if (priority := body.get("priority")) is not None:
            self.priorities[rid] = priority
        if priority and not self.has_policy:
            words = f"Got priority {priority} but Priority scheduling is not enabled."
            error = {"message": words, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": error}, status=400)
        if status := int(fate.get("status", 0)):
            headers = {"Retry-After": fate["retry_after"]} if "retry_after" in fate else {}
            error = {"message": f"scripted {status}", "param": "user", "code": status}
            return web.json_response({"error": error}, status=status, headers=headers)
        if self.max_queued is not None and self.running + self.waiting >= self.max_queued:
            self.refused += 1
            error = {"message": FULL, "type": "Service Unavailable", "param": None, "code": 503}
            return web.json_response({"error": error}, status=503)
        await self.held.wait()
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        self.most = max(self.most, self.running)
        self._note("start", rid)
        try:
            await asyncio.sleep(self.first_s)
            response = await self._answer(request, rid, body, fate)
            self.finished += 1
            self._note("end", rid)
        finally:
            self.running -= 1
            self._free.release()
        # As in vLLM, the slot is free before a client can know that its answer is whole.
        if response.prepared:
            await response.write(b"data: [DONE]\n\n")
        return response

    def _fate(self, rid: str, body: dict[str, Any]) -> dict[str, str]:
        words = str(body.get("user") or "")
        if not words.startswith("stub:"):
            return {}
        fate = {k: v for k, _, v in (w.partition("=") for w in words[5:].split(","))}
        self.times[rid] += 1
        return {} if "times" in fate and self.times[rid] > int(fate["times"]) else fate

    async def _answer(
        self, request: web.Request, rid: str, body: dict[str, Any], fate: dict[str, str]
    ) -> web.StreamResponse:
        seconds = float(fate.get("seconds", self.latency_s))
        if request.path in OTHER_ANSWERS:
            return web.json_response({"id": rid, "asked": body} | OTHER_ANSWERS[request.path])
        if request.path not in GENERATING:
            found = {"path": request.path, "asked": body}
            return web.json_response({"id": rid, "data": [found], "usage": _USAGE})
        chat = "messages" in body
        text = f"simulated {digest(body)}"
        if not body.get("stream"):
            if "cut" in fate and request.transport is not None:
                request.transport.abort()
                raise ConnectionResetError("scripted")
            await asyncio.sleep(seconds)
            content = {"message": {"role": "assistant", "content": text}} if chat else {
                "text": text}  # fmt: skip
            choice = {"index": 0, "finish_reason": "stop", "logprobs": None, **content}
            return web.json_response(self._frame(rid, chat, body) | {
                "choices": [choice], "usage": _USAGE})  # fmt: skip
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        size = -(-len(text) // CHUNKS)
        for n in range(CHUNKS):
            if n == 1:
                await self._befall(request, response, fate)
            piece = text[n * size : (n + 1) * size]
            content = {"delta": {"content": piece}} if chat else {"text": piece}
            end = "stop" if n == CHUNKS - 1 else None
            choice = {"index": 0, "finish_reason": end, "logprobs": None, **content}
            if chat and n == 0:
                choice["delta"]["role"] = "assistant"
            await _send(response, self._frame(rid, chat, body) | {"choices": [choice]})
            self.tokens += 1
            if n < CHUNKS - 1:
                self.gaps, self.gaps_s = self.gaps + 1, self.gaps_s + seconds / (CHUNKS - 1)
                await asyncio.sleep(seconds / (CHUNKS - 1))
        await _send(response, self._frame(rid, chat, body) | {"choices": [], "usage": _USAGE})
        return response

    async def _befall(
        self, request: web.Request, response: web.StreamResponse, fate: dict[str, str]
    ) -> None:
        if "die" in fate:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in fate:
            await asyncio.Event().wait()
        if "cut" in fate and request.transport is not None:
            request.transport.abort()
            raise ConnectionResetError("scripted")
        if "error" in fate:
            error = {"message": "scripted", "code": int(fate["error"])}
            await _send(response, {"error": error})

    def _frame(self, rid: str, chat: bool, body: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion" if chat else "text_completion"
        chunk = ".chunk" if chat and body.get("stream") else ""
        return {"id": rid, "object": kind + chunk, "created": 1, "model": self.model}

    def _note(self, what: str, rid: str) -> None:
        if self._log is not None:
            file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{what} {rid} {os.getpid()}\n".encode())
            os.close(file)


#: Answers of the urls that have neither choices nor data.
OTHER_ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "type": "message", "model": "stub", "stop_reason": "end_turn",
        "content": [{"type": "text", "text": "simulated"}],
        "usage": {"input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 4},
    },
    "/v1/responses": {
        "object": "response", "model": "stub", "status": "completed", "output": [],
        "usage": {"input_tokens": 5, "output_tokens": 4, "total_tokens": 9},
    },
    "/v1/messages/count_tokens": {"input_tokens": 5},
    "/tokenize": {"count": 1, "max_model_len": 9, "tokens": [7]},
}  # fmt: skip
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


async def _send(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await response.write(b"data: " + orjson.dumps(data) + b"\n\n")


class StubProcess:
    """The same in a process of its own, which can be killed and started again on its port."""

    def __init__(self, *options: object) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._options = [str(option) for option in options]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, __file__, "--port", str(self.port), *self._options]
        self.process = subprocess.Popen(command)
        eventually(self._answers, 20, "the stub server answers")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url.removesuffix("/v1") + "/metrics", timeout=5) as r:
                return bool(r.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


async def _serve(server: StubServer) -> None:
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--log", type=Path)
    chosen = parser.parse_args()
    stub = StubServer(chosen.slots, chosen.latency_s, log=chosen.log)
    stub.port = chosen.port
    asyncio.run(_serve(stub))
