"""A stub server whose answers a test writes byte by byte, and the openai engine before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from aiohttp import web
from kit.servers.stub_server import StubServer

from contract.openai.body import CHAT_URL
from worker.engine import EngineRequest
from worker.engine.openai import OpenAISettings, blame
from worker.engine.openai.blame import CONTROL_ID
from worker.engine.openai.engine import OpenAIEngine

Json = dict[str, Any]


@dataclass
class Raw:
    """An HTTP answer: `pieces` are sent one by one; `stays`: the connection is then kept open."""

    pieces: Sequence[bytes]
    content_type: str = "text/event-stream"
    status: int = 200
    stays: bool = False
    headers: dict[str, str] = field(default_factory=dict)


def at_once(body: Any, status: int = 200) -> Raw:
    """Return an answer in JSON."""
    return Raw([orjson.dumps(body)], "application/json", status)


def stream(*chunks: Json, done: bool = True) -> Raw:
    """Return an answer in events."""
    end = [b"data: [DONE]\n\n"] if done else []
    return Raw([b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks] + end)


def sse(*pieces: bytes) -> Raw:
    """Return an answer in events as they are written."""
    return Raw(pieces)


class ScriptedServer(StubServer):
    """Answers what `script` says to each body, and the engine's controls well.

    `bodies` are those that came, but for controls. `controls`: it says so to these, too.
    """

    def __init__(
        self, script: Callable[[Json], Raw], *, vllm: bool = False, controls: bool = False
    ) -> None:
        super().__init__(vllm=vllm)
        self.script, self.controls = script, controls
        self.bodies: list[Json] = []

    async def _respond(self, request: web.Request, rid: str, body: Json) -> web.StreamResponse:
        if rid != CONTROL_ID:
            self.bodies.append(body)
        elif not self.controls:
            return await super()._respond(request, rid, body)
        raw = self.script(body)
        headers = {"Content-Type": raw.content_type, **raw.headers}
        response = web.StreamResponse(status=raw.status, headers=headers)
        await response.prepare(request)
        for piece in raw.pieces:
            await response.write(piece)
        if raw.stays:
            await asyncio.Event().wait()
        return response


@asynccontextmanager
async def answered_by(
    script: Callable[[Json], Raw], *, vllm: bool = False, controls: bool = False, **settings: Any
) -> AsyncIterator[tuple[ScriptedServer, OpenAIEngine]]:
    """Yield a server with this script, and a started engine before it that tries again soon."""
    async with ScriptedServer(script, vllm=vllm, controls=controls) as server:
        known: Json = {"engine": "openai", "openai_base_urls": server.url, "model": None}
        engine = OpenAIEngine(OpenAISettings(**known | settings))
        await engine.start()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(blame, "BACKOFF_S", 0.02)
                yield server, engine
        finally:
            await asyncio.to_thread(engine.shutdown)


def chat(**fields: Any) -> EngineRequest:
    """Return a chat request."""
    return EngineRequest(CHAT_URL, {"messages": [{"role": "user", "content": "hello"}], **fields})


async def answer(engine: OpenAIEngine, request: EngineRequest | None = None) -> Json:
    """Return the body of the answer to a request."""
    done = await engine.generate(request or chat(), "r1")
    return orjson.loads(done.body)  # type: ignore[no-any-return]


def delta(index: int = 0, end: str | None = None, **fields: Any) -> Json:
    """Return a chunk of a chat."""
    choice = {"index": index, "delta": fields, "finish_reason": end}
    return {"id": "x", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}


def text(index: int, piece: str, end: str | None = None) -> Json:
    """Return a chunk of a completion."""
    return {"id": "x", "choices": [{"index": index, "text": piece, "finish_reason": end}]}


USAGE: Json = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
#: A chat in a stream, and the same at once.
HELLO = [delta(role="assistant", content="hel"), delta(content="lo", end="stop"), USAGE]
WHOLE: Json = {
    "id": "x", "object": "chat.completion", "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None,
                 "message": {"role": "assistant", "content": "hello"}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}  # fmt: skip
