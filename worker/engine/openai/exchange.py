"""Sends a request to a server over HTTP, and returns the answer."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson

from contract.openai.body import GENERATING, LIMITS, min_body
from worker.engine.openai.answers import (
    check_choices,
    lost_error,
    raise_error,
    read_whole,
    requested_choices,
    tidied,
)
from worker.engine.openai.dialect import refused_field
from worker.engine.openai.reassembly import Reassembly, streamable
from worker.engine.openai.retries import Condition, Unanswered, read_error
from worker.engine.openai.sse import Events, Unreadable
from worker.engine.openai.upstream import ASK_S, Upstream
from worker.engine.remote.servers import Interrupted

log = logging.getLogger(__name__)

#: Tokens in each chunk of vLLM's streams; larger chunks are less work for both sides.
STREAM_INTERVAL = 16
#: Most bytes of an unreadable response that an error text shows.
SHOWN = 200
#: Seconds that a connection may stay open after [DONE].
TAIL_S = 1.0
#: Bytes with which a stream may begin: a comment, or the name of a field.
_FIELDS = (b":", b"data", b"event", b"id", b"retry", b"error")
#: Bytes that may come before an answer: blanks that keep the connection, a byte order mark.
_BLANK = b" \t\r\n\xef\xbb\xbf"

Json = dict[str, Any]


async def exchange(
    upstream: Upstream,
    url: str,
    body: Json,
    request_id: str,
    partial: dict[str, Reassembly],
    trace: Mapping[str, str] | None = None,
    added: Mapping[str, Any] = MappingProxyType({}),
    *,
    streamed: bool = True,
) -> Json:
    """Send a request and return its whole answer, or raise Unanswered.

    Cancelling closes the connection. If the server refuses a field that warmq has added (`stream`,
    `stream_options`, `stream_interval`, `priority`), the request is sent again without that field.

    Args:
        upstream: the server.
        url: the endpoint's path, for example /v1/chat/completions.
        body: a checked request without `stream`.
        request_id: sent as X-Request-Id; vLLM makes the answer's id from it.
        partial: gets the answer in progress, if it is streamed; the caller removes it.
        trace: HTTP headers with which the server continues a sampled trace.
        added: fields to send instead of the body's, unless the server refuses them.
        streamed: whether to ask for a stream, if the request and the server allow it.
    """
    dialect = upstream.dialects[url]
    left_out = set(dialect.refused)
    ours: Json = {"stream": True, "stream_options": {"include_usage": True}}
    if upstream.vllm:
        ours["stream_interval"] = STREAM_INTERVAL
    while True:
        whole, more = Reassembly(url, body, vllm=upstream.vllm), dict(added)
        partial.pop(request_id, None)
        if streamed and url in GENERATING and streamable(body) and "stream" not in left_out:
            partial[request_id] = whole
            more |= ours
        more = {name: value for name, value in more.items() if name not in left_out}
        try:
            answer = await _once(upstream, url, body | more, request_id, whole, trace)
        except Unanswered as fault:
            name = refused_field(fault, more)
            if name is None:
                raise
            left_out.add(name)
            continue
        if left_out != dialect.refused:
            dialect.learn(left_out)
        upstream.finished += requested_choices(url, body) if url in GENERATING else 1
        return answer


async def smallest(upstream: Upstream, url: str, request_id: str, tokens: int = 1) -> Json:
    """Send the smallest request that the server can answer, and return the answer."""
    body = min_body(url) | {"model": upstream.model}
    if url in LIMITS:
        body[LIMITS[url][0]] = tokens
    if tokens > 1 and upstream.vllm:
        body["ignore_eos"] = True
    return await exchange(upstream, url, body, request_id, {})


async def _once(
    upstream: Upstream,
    url: str,
    body: Json,
    request_id: str,
    whole: Reassembly,
    trace: Mapping[str, str] | None,
) -> Json:
    # Without a stream, the server may have run the request before the connection was lost.
    inside = "stream" not in body
    try:
        posting = _post(upstream, url, body, request_id, trace)
        async with upstream.running(), posting as response:
            upstream.progress()
            if not 200 <= response.status < 300:
                headers = (response.headers.get(name) for name in ("Retry-After", "Location"))
                raise read_error(response.status, await response.read(), *headers)
            inside = True
            return await _receive(upstream, url, body, response, whole)
    except Interrupted as error:
        raise Unanswered(Condition.STALLED, str(error), inside=True) from error
    except TimeoutError as error:  # raised by aiohttp; only connecting has a time limit
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
    # Redirects are not followed: they would send the API key to another server.
    return upstream.session.post(
        address, data=orjson.dumps(body), headers=headers, allow_redirects=False
    )


async def _receive(
    upstream: Upstream, url: str, body: Json, response: aiohttp.ClientResponse, whole: Reassembly
) -> Json:
    """Read an answer: a stream, or one JSON object, whichever the server sends."""
    content, raw = response.content, b""
    while not raw and (piece := await content.readany()):
        upstream.progress()  # servers send spaces or comments while they work
        raw = piece.lstrip(_BLANK)
    try:
        if url in GENERATING and raw[:1] not in (b"{", b"["):
            return await _read_stream(upstream, url, body, response, raw, whole)
        pieces = [raw]
        while piece := await content.readany():
            upstream.progress()
            pieces.append(piece)
        raw = b"".join(pieces)
        return read_whole(url, body, upstream.dialects[url], raw)
    except Unreadable as error:
        raise _garbled(error.data) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _garbled(raw) from error


async def _read_stream(
    upstream: Upstream,
    url: str,
    body: Json,
    response: aiohttp.ClientResponse,
    piece: bytes,
    whole: Reassembly,
) -> Json:
    events, beginning, dialect = Events(), piece, upstream.dialects[url]
    while piece and not events.done:
        _add(whole, events.feed(piece))
        whole.half_characters = events.half_characters
        upstream.progress()
        piece = b"" if events.done else await response.content.readany()
    if events.done:
        await _read_rest(response)
    else:
        _close(events, whole)
    if whole.empty and beginning and not beginning.startswith(_FIELDS):
        raise _garbled(beginning)
    check_choices(url, body, dialect, whole.choices, finished=events.done)
    answer = tidied(whole.body())
    dialect.sends_done |= upstream.vllm  # vLLM ends every stream with [DONE]
    if dialect.ends_early(done=events.done, used=bool(answer.get("usage"))):
        raise lost_error()
    return answer


def _add(whole: Reassembly, chunks: Iterable[Json]) -> None:
    for chunk in chunks:
        try:
            if chunk.get("error") or "choices" not in chunk:
                raise_error(chunk, ("choices",))
            whole.add(chunk)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unreadable(str(chunk).encode(errors="replace")) from error


def _close(events: Events, whole: Reassembly) -> None:
    """Read a last line that has no newline. Raises Unanswered if its event is cut."""
    try:
        _add(whole, events.close())
    except Unreadable as error:
        shown = "" if error.data.startswith(b"{") else f": {error.data[:SHOWN]!r}"
        raise lost_error(f"the answer ends early{shown}") from error
    whole.half_characters = events.half_characters


async def _read_rest(response: aiohttp.ClientResponse) -> None:
    """Read the bytes after [DONE], so that the connection can be used again."""
    if not response.content.at_eof():
        with suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(TAIL_S):
                while await response.content.readany():
                    continue


def _garbled(raw: bytes) -> Unanswered:
    text = f"a response that cannot be read: {raw[:SHOWN]!r}"
    return Unanswered(Condition.GARBLED, text, inside=True)


async def prompt_tokens(upstream: Upstream, body: Json) -> int | None:
    """Return the tokens of a completion's longest prompt; None if the server cannot count."""
    prompt = body["prompt"]
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if prompts and isinstance(prompts[0], int):
        return len(prompts)
    counts = [len(p) for p in prompts if isinstance(p, list)]
    try:
        for text in (p for p in prompts if isinstance(p, str)):
            question = {"model": body["model"], "prompt": text}
            async with asyncio.timeout(ASK_S), _post(upstream, "/tokenize", question) as response:
                counts.append(int(orjson.loads(await response.read())["count"]))
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, LookupError) as error:
        log.debug("cannot count a prompt's tokens: %s", error)
        return None
    return max(counts, default=None)
