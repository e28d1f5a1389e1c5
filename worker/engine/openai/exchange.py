"""Sends one request to one server over HTTP and reads its answer, or what came instead."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import orjson

from contract.openai.body import GENERATING
from contract.openai.pooling import POOLING_TYPES
from worker.engine.openai.reassembly import Reassembly, streamable
from worker.engine.openai.retries import Condition, Unanswered, unanswered
from worker.engine.openai.upstream import ASK_S, Upstream
from worker.engine.remote.server import Interrupted

log = logging.getLogger(__name__)

#: vLLM sends a chunk for so many tokens instead of for each: much less work for both sides.
STREAM_INTERVAL = 16

Json = dict[str, Any]


async def exchange(
    upstream: Upstream,
    url: str,
    body: Json,
    request_id: str,
    partial: dict[str, Reassembly],
    trace: Mapping[str, str] | None = None,
) -> Json:
    """Send a request once and return its whole answer; cancelling closes the connection.

    `url` is the endpoint, as /v1/chat/completions; `body` a checked request without `stream`; vLLM
    takes its answer's id from `request_id`. `partial` gets the answer in the making, if it is
    streamed; the caller removes it. `trace` are the headers of a trace that is sampled: a server
    that traces too continues it.

    Raises:
        Unanswered: whatever else came.
    """
    whole = None
    if url in GENERATING and streamable(body):
        whole = partial[request_id] = Reassembly(url, body, vllm=upstream.vllm)
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        if upstream.vllm:
            body["stream_interval"] = STREAM_INTERVAL
    # Only a stream tells whether the server took the request in before the connection was lost.
    inside = whole is None
    try:
        posting = _post(upstream, url, body, request_id, trace)
        async with upstream.running(), posting as response:
            upstream.progress()
            if response.status != 200:
                told = (response.headers.get(name) for name in ("Retry-After", "Location"))
                raise unanswered(response.status, await response.read(), *told)
            inside = True
            return await _receive(upstream, url, response, whole)
    except Interrupted as error:
        raise Unanswered(Condition.STALLED, str(error), inside=True) from error
    except TimeoutError as error:  # aiohttp's own: only connecting has a limit
        raise Unanswered(Condition.CONNECT, "no connection in time") from error
    except aiohttp.ClientConnectorError as error:
        raise Unanswered(Condition.CONNECT, str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        text = str(error) or type(error).__name__
        raise Unanswered(Condition.LOST, text, inside=inside) from error


def _post(
    upstream: Upstream,
    url: str,
    body: Json,
    request_id: str = "",
    trace: Mapping[str, str] | None = None,
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    headers = {"Content-Type": "application/json", **(trace or {})}
    if request_id:
        headers["X-Request-Id"] = request_id
    of_v1 = url.startswith("/v1/")
    address = upstream.base + url.removeprefix("/v1") if of_v1 else upstream.root + url
    # Redirects are not followed: nowhere else does the key go.
    return upstream.session.post(
        address, data=orjson.dumps(body), headers=headers, allow_redirects=False
    )


async def _receive(
    upstream: Upstream, url: str, response: aiohttp.ClientResponse, whole: Reassembly | None
) -> Json:
    if whole is None:
        raw = bytearray()
        async for piece in response.content.iter_any():
            upstream.progress()
            raw += piece
        return _read(url, bytes(raw))
    async for data in _events(upstream, response):
        _add(whole, data)
    if "abort" in whole.ends:
        raise Unanswered(Condition.ENDED, "the server was told to end")
    if not whole.ends or not all(whole.ends):
        raise Unanswered(Condition.LOST, "the answer ends early", inside=True)
    return whole.body()


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


def _read(url: str, raw: bytes) -> Json:
    try:
        answer = orjson.loads(raw)
        # Only chats and completions tell how each choice ended.
        choices = answer["choices"] if url in GENERATING else ()
        if url in POOLING_TYPES and answer.keys().isdisjoint(("data", "results")):
            raise LookupError("neither data nor results")
        ends = [choice["finish_reason"] for choice in choices]
        whole = dict(answer.items())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _garbled(raw) from error
    if "abort" in ends:
        raise Unanswered(Condition.ENDED, "the server was told to end")
    return whole


def _garbled(raw: bytes) -> Unanswered:
    return Unanswered(Condition.GARBLED, f"a response that cannot be read: {raw[:80]!r}")


async def _events(upstream: Upstream, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield each event's data; a line may have any length."""
    rest = b""
    async for piece in response.content.iter_any():
        upstream.progress()  # a comment is a sign of life, too
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield data


async def prompt_tokens(upstream: Upstream, body: Json) -> int | None:
    """Return the tokens of a completion's longest prompt; None if the server does not count."""
    prompt = body["prompt"]
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if prompts and isinstance(prompts[0], int):
        return len(prompts)
    counts = [len(p) for p in prompts if isinstance(p, list)]
    try:
        for text in (p for p in prompts if isinstance(p, str)):
            asked = {"model": body["model"], "prompt": text}
            async with asyncio.timeout(ASK_S), _post(upstream, "/tokenize", asked) as response:
                counts.append(int(orjson.loads(await response.read())["count"]))
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, LookupError) as error:
        log.debug("cannot count a prompt's tokens: %s", error)
        return None
    return max(counts, default=None)
