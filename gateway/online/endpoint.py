"""Serves online requests, one ASGI application for each URL; has the routes of models."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from contract.errors import RequestRejected
from contract.message import write_online
from contract.naming import turn_list
from contract.openai.body import RESPONSES_URL
from contract.results import body_of, error_of, read_meta
from contract.traces import now
from gateway.http.bodies import whole_body
from gateway.http.caller import Caller
from gateway.http.idempotency import ONLINE_BODY_TYPES
from gateway.http.json_api import caller, reply
from gateway.http.limits import check_model
from gateway.http.services import Services
from gateway.http.tracing import current
from gateway.online.answer import StreamedAnswer, answer_of, header_pairs
from gateway.online.events import complete_response_json
from gateway.online.models import ModelList
from gateway.online.pending import ClientGone, TimedOut, Waiter, do_nothing
from gateway.online.request import OnlineRequest, read, with_model
from gateway.online.responses import calls
from gateway.online.state import OnlineState
from gateway.redis.online import Push

#: Milliseconds for which a result is kept for a gateway that lost its connection to Redis, and for
#: which the result of a request with an Idempotency-Key is kept for retries.
KEEP_MS, KEEP_ONCE_MS = 120_000, 86_400_000
#: Seconds from a caller's timeout to the request's deadline, which ends it if its gateway died.
DEADLINE_GRACE_S = 10.0
#: Most seconds that a streamed answer may take.
STREAM_S = 3600.0
#: Largest body in bytes that is kept while its answer is awaited.
_SMALL = 4096
#: UUID namespace of the request ids that are derived from Idempotency-Keys.
_ONCE = uuid.UUID("4f0d8d6a-6a0c-5b3f-9f0e-1a2a2f3c9b77")


class Endpoint:
    """Answers POSTs to one URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        began = time.monotonic()
        services: Services = scope["app"].state.services
        online: OnlineState = scope["app"].state.online
        caller: Caller = scope["warmq.caller"]
        raw = await whole_body(receive)
        if raw is None:
            return
        asked, size = read(self._url, raw, caller.highest_priority), len(raw)
        del raw  # it may be megabytes, and its answer may take an hour
        if asked.model:
            check_model(caller, asked.model)
        queue, model = await online.models.queue_and_name(
            asked.model, caller.models, may_wait=asked.background
        )
        if model != (asked.model or ""):
            # Without a name the worker would run its default model, which the key may forbid.
            asked = with_model(asked, model)
        if asked.background:
            await (await _answer_later(asked, scope, queue, size))(scope, receive, send)
            return
        headers = await services.limits.check_online(caller, asked.tokens)
        once: str = scope.get("warmq.idempotency", "")
        on_queued: Callable[[], None] = getattr(
            scope.get("warmq.body"), "stop_counting", do_nothing
        )
        body = waiter = None
        try:
            waiter = await _queue(online, asked, caller, queue, once, on_queued)
            if len(asked.body) > _SMALL:
                asked = replace(asked, body=b"")
            digest: str = scope.get("warmq.key_digest", "")
            if digest:
                online.revocations.add(digest, waiter)
            try:
                body = await _answer(asked, waiter, online, headers, began, receive, send)
            finally:
                if digest:
                    online.revocations.remove(digest, waiter)
        finally:
            if caller.tokens_per_minute is not None:
                used = tokens_used(asked, waiter, body, goes_on=bool(once))
                services.limits.correct(caller, used - asked.tokens)


async def _answer_later(asked: OnlineRequest, scope: Scope, queue: str, size: int) -> Response:
    """Create a background response; `size` is that of the request's body."""
    services: Services = scope["app"].state.services
    caller: Caller = scope["warmq.caller"]
    await services.limits.check_write(caller)
    response = reply(
        await run_in_threadpool(
            calls.create, services, caller, asked, queue, scope.get("warmq.idempotency", "")
        )
    )
    scope["warmq.written"] = size, bytes(response.body)
    return response


async def _queue(
    online: OnlineState, asked: OnlineRequest, caller: Caller, queue: str, once: str,
    on_queued: Callable[[], None],
) -> Waiter:  # fmt: skip
    """Queue a request; `once` is the same for each retry, '' without an Idempotency-Key."""
    pending, streams = online.pending, asked.stream is not None
    # Text is counted while it is written, even if it is not sent: the caller may close the
    # connection before the end of the answer.
    listens = streams or caller.tokens_per_minute is not None
    request_id = f"once-{uuid.uuid5(_ONCE, once)}" if once else pending.new_id()
    timeout_s = STREAM_S if streams else online.timeout_s + DEADLINE_GRACE_S
    trace = current()
    span = trace.context.child() if trace is not None else None
    began = now() if span is not None else 0
    message = write_online(
        request_id,
        asked.url,
        asked.body,
        queue=queue,
        priority=asked.priority,
        tenant=caller.tenant,
        deadline=time.time() + online.models.clock_ahead + timeout_s,
        keep_ms=KEEP_ONCE_MS if once else KEEP_MS,
        listener=pending.name if listens else "",
        trace=span.headers() if span is not None else None,
        sequences=asked.sequences,
    )
    list_key = turn_list(queue, asked.priority, caller.tenant)
    push = Push(list_key, request_id, KEEP_ONCE_MS if once else None, message)
    waiter = await pending.ask(push, listens=listens, on_queued=on_queued)
    if trace is not None and span is not None:
        trace.queued(span, queue, request_id, began)
    return waiter


async def _answer(
    asked: OnlineRequest, waiter: Waiter, online: OnlineState, headers: Mapping[str, str],
    began: float, receive: Receive, send: Send,
) -> bytes | None:  # fmt: skip
    """Answer a request that was queued; return its answer, or None."""
    timeout_s = STREAM_S if asked.stream else online.timeout_s
    timer = asyncio.get_running_loop().call_later(timeout_s, waiter.end, TimedOut())
    watching = asyncio.create_task(_end_with_client(receive, waiter))
    try:
        if asked.stream is not None:
            return await StreamedAnswer(asked, waiter, send, headers).run(timeout_s)
        body = await answer_of(waiter, timeout_s)
        if body is not None:
            content = complete_response_json(body) if asked.url == RESPONSES_URL else body
            await _send_whole(content, headers, began, send)
        return body
    finally:
        timer.cancel()
        watching.cancel()
        online.pending.leave(waiter)


async def _end_with_client(receive: Receive, waiter: Waiter) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    waiter.end(ClientGone())


async def _send_whole(body: bytes, headers: Mapping[str, str], began: float, send: Send) -> None:
    pairs = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"openai-processing-ms", b"%d" % round(1000 * (time.monotonic() - began))),
        *header_pairs(headers),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class _Usage(msgspec.Struct):
    """The `usage` of an answer; Anthropic's has no total."""

    total_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Answer(msgspec.Struct):
    """The fields with an answer's tokens: `count` of /tokenize, `input_tokens` of count_tokens."""

    usage: _Usage | None = None
    count: int | None = None
    input_tokens: int | None = None


_decode = msgspec.json.Decoder(_Answer).decode


def reported_tokens(body: bytes) -> int | None:
    """Return the number of tokens that an answer reports, or None."""
    try:
        answer = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    usage = answer.usage
    if usage is None:
        return answer.count if answer.count is not None else answer.input_tokens
    if usage.total_tokens is not None:
        return usage.total_tokens
    return (usage.input_tokens or 0) + (usage.output_tokens or 0)


def tokens_used(
    asked: OnlineRequest, waiter: Waiter | None, body: bytes | None, *, goes_on: bool
) -> int:
    """Return the prompt and answer tokens that a request has used, even if it failed.

    An answer reports them. Without one they are the prompt's tokens plus those of the text written
    so far: at most one for each byte, and at most `max_tokens`. The result is 0 if the request was
    not run: it was not queued, or its engine refused it.

    Args:
        asked: The request.
        waiter: Its waiter; None if it was not queued.
        body: Its answer; None if the caller got none.
        goes_on: Whether it runs to its end even if its caller closes the connection.
    """
    meta = waiter.ending.result() if waiter is not None and waiter.has_result() else None
    if body is None and meta is not None:
        body = body_of(meta)  # the client has gone, or was sent another text
    if body is not None:
        used = reported_tokens(body)
        return asked.prompt_tokens if used is None else used
    if waiter is None or not waiter.pushed or waiter.lost_store():
        return 0
    written, most = waiter.text_bytes, asked.tokens - asked.prompt_tokens
    if meta is not None:
        if not written and not _was_run(meta):
            return 0
    elif most and (goes_on or not asked.text_is_answer):
        written = most  # the length of the written text is unknown
    return asked.prompt_tokens + (min(written, most) if most else written)


def _was_run(meta: bytes) -> bool:
    """Return whether an engine ran a failed request; a request that it refuses costs nothing."""
    timing = (read_meta(meta).get("warmq") or {}).get("timing")
    return bool(timing) and not isinstance(error_of(meta), RequestRejected)


async def _models(request: Request) -> Response:
    online: OnlineState = request.app.state.online
    return reply(ModelList(await online.models.all_allowed(caller(request).models)))


async def _model(request: Request) -> Response:
    online: OnlineState = request.app.state.online
    name = request.path_params["model"]
    return reply(await online.models.get(name, caller(request).models))


def routes() -> list[Route]:
    """Return the routes: one for each URL of online requests, and those of models."""
    return [
        *(Route(url, Endpoint(url), methods=["POST"]) for url in ONLINE_BODY_TYPES),
        Route("/v1/models", _models),
        Route("/v1/models/{model:path}", _model),
    ]
