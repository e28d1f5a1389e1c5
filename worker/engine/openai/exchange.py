"""One request to one server and its answer, over HTTP: nothing is decided here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from contract.openai.body import GENERATING
from worker.engine.openai.reassembly import Reassembly, streamable
from worker.engine.openai.retries import Condition, Unanswered, unanswered
from worker.engine.openai.upstream import PROBE_TIMEOUT, Upstream

log = logging.getLogger(__name__)

#: vLLM sends a chunk for so many tokens instead of for each: much less work for both sides.
STREAM_INTERVAL = 16

Json = dict[str, Any]


async def exchange(
    session: aiohttp.ClientSession,
    upstream: Upstream,
    url: str,
    body: Json,
    request_id: str,
    partial: dict[str, Reassembly],
) -> Json:
    """Send a request once and return its whole answer; cancelling closes the connection.

    Args:
        session: the one pool.
        upstream: which server.
        url: the endpoint, as /v1/chat/completions.
        body: a checked request without `stream`.
        request_id: vLLM takes its answer's id from it.
        partial: gets the answer in the making, if it is streamed; the caller removes it.

    Raises:
        Unanswered: whatever else came.
    """
    whole = None
    if url in GENERATING and streamable(body):
        whole = partial[request_id] = Reassembly(url, body, vllm=upstream.vllm)
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        if upstream.vllm:
            body["stream_interval"] = STREAM_INTERVAL
    call = _Call(session, upstream, whole)
    scope = asyncio.timeout(None)
    try:
        async with scope:
            with upstream.watched(scope):
                return await call.run(url, orjson.dumps(body), request_id)
    except TimeoutError as error:
        if not scope.expired():  # aiohttp's own: only connecting has a limit
            raise Unanswered(Condition.CONNECT, "no connection in time") from error
        raise Unanswered(Condition.STALLED, "no step was made", inside=True) from error
    except aiohttp.ClientConnectorError as error:
        raise Unanswered(Condition.CONNECT, str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        text = str(error) or type(error).__name__
        # Without a stream nothing tells whether the answer had begun.
        raise Unanswered(Condition.LOST, text, inside=call.begun or whole is None) from error


class _Call:
    """`begun`: whether the server took the request in."""

    def __init__(
        self, session: aiohttp.ClientSession, upstream: Upstream, whole: Reassembly | None
    ) -> None:
        self.begun = False
        self._session = session
        self._upstream = upstream
        self._whole = whole

    async def run(self, url: str, raw: bytes, request_id: str) -> Json:
        async with self._session.post(
            self._upstream.address(url),
            data=raw,
            headers={"Content-Type": "application/json", "X-Request-Id": request_id},
            allow_redirects=False,  # nowhere else does the key go
        ) as response:
            self._upstream.progress()
            self.begun = response.status == 200
            if not self.begun:
                retry_after = response.headers.get("Retry-After")
                raise unanswered(response.status, await response.read(), retry_after)
            if self._whole is None:
                return _read(await response.read())
            async for data in _events(response):
                self._upstream.progress()
                _add(self._whole, data)
        if self._whole.aborted:
            raise Unanswered(Condition.ENDED, "the server was told to end")
        if not self._whole.finished:
            raise Unanswered(Condition.LOST, "the answer ends early", inside=True)
        return self._whole.body()


def _add(whole: Reassembly, data: bytes) -> None:
    try:
        chunk = orjson.loads(data)
        error = chunk.get("error")
        if error is None:
            whole.add(chunk)
            return
        code = error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _garbled(data) from error
    fault = unanswered(code if isinstance(code, int) else 500, data)
    fault.inside = True
    raise fault


def _read(raw: bytes) -> Json:
    try:
        answer = orjson.loads(raw)
        # Embeddings are `data`, rerankings `results`: they have no ending.
        choices = () if "data" in answer or "results" in answer else answer["choices"]
        ends = [choice["finish_reason"] for choice in choices]
    except (ValueError, LookupError, TypeError) as error:
        raise _garbled(raw) from error
    if "abort" in ends:
        raise Unanswered(Condition.ENDED, "the server was told to end")
    return dict(answer)


def _garbled(raw: bytes) -> Unanswered:
    return Unanswered(Condition.GARBLED, f"a response that cannot be read: {raw[:80]!r}")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield each event's data; a line may have any length."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield data


async def prompt_tokens(
    session: aiohttp.ClientSession, upstream: Upstream, body: Json
) -> int | None:
    """Return the tokens of a completion's longest prompt; None if the server does not count."""
    prompt = body["prompt"]
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if prompts and isinstance(prompts[0], int):
        return len(prompts)
    counts = [len(p) for p in prompts if isinstance(p, list)]
    try:
        for text in (p for p in prompts if isinstance(p, str)):
            raw = orjson.dumps({"model": body["model"], "prompt": text})
            async with session.post(
                f"{upstream.root}/tokenize",
                data=raw,
                headers={"Content-Type": "application/json"},
                timeout=PROBE_TIMEOUT,
                allow_redirects=False,
            ) as response:
                counts.append(int(orjson.loads(await response.read())["count"]))
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, LookupError) as error:
        log.debug("cannot count a prompt's tokens: %s", error)
        return None
    return max(counts, default=None)
