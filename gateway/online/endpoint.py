"""One online request from its body to its answer: an ASGI application for each URL; its routes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

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
from gateway.http.limits import Allowance, check_model
from gateway.http.services import Services
from gateway.http.tracing import current
from gateway.online.answer import StreamedAnswer, answer_of, header_pairs
from gateway.online.events.responses import complete_response_json
from gateway.online.models import ModelList
from gateway.online.pending import ClientGone, TimedOut, Waiter, do_nothing
from gateway.online.request import OnlineRequest, read, with_model
from gateway.online.state import OnlineState
from gateway.redis.online import Push

#: How long results are kept: for a gateway whose connection was lost, and for whoever asks again
#: with the same Idempotency-Key.
KEEP_MS, KEEP_ONCE_MS = 120_000, 86_400_000
#: A request that nobody waits for any more, because its gateway died, does not begin later than so
#: long after its time.
DEADLINE_GRACE_S = 10.0
#: A stream may take so long in all; it shows that it lives.
STREAM_S = 3600.0
#: A body of more bytes is not held while its answer is waited for.
_SMALL = 4096
#: Request ids of Idempotency-Keys are made in this namespace.
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
        asked = read(self._url, raw, caller.highest_priority)
        del raw  # it may be megabytes, and its answer may take an hour
        if asked.model:
            check_model(caller, asked.model)
        queue, model = await online.models.asked(asked.model, caller.models)
        if model != (asked.model or ""):
            asked = with_model(asked, model)  # else the worker runs what it has, allowed or not
        allowance = await services.limits.check_online(caller, asked.tokens)
        once: str = scope.get("warmq.idempotency", "")
        queued: Callable[[], None] = getattr(scope.get("warmq.body"), "queued", do_nothing)
        body = waiter = None
        try:
            waiter = await _ask(online, asked, caller, queue, once, queued)
            if len(asked.body) > _SMALL:
                asked = replace(asked, body=b"")
            digest: str = scope.get("warmq.key_digest", "")
            if digest:
                online.revocations.add(digest, waiter)
            try:
                body = await _answer(asked, waiter, online, allowance, began, receive, send)
            finally:
                if digest:
                    online.revocations.remove(digest, waiter)
        finally:
            if caller.tokens_per_minute is not None:
                allowance.settle(tokens_used(asked, waiter, body, goes_on=bool(once)))


async def _ask(
    online: OnlineState, asked: OnlineRequest, caller: Caller, queue: str, once: str,
    queued: Callable[[], None],
) -> Waiter:  # fmt: skip
    """Queue a request; `once` is the same text for each try of one request, '' for single ones."""
    waiting = online.waiting
    # What is written is counted also where it is not sent, for who hangs up before its end.
    listens = asked.stream is not None or caller.tokens_per_minute is not None
    request_id = f"once-{uuid.uuid5(_ONCE, once)}" if once else waiting.new_id()
    streams = asked.stream is not None
    lasts_s = STREAM_S if streams else online.timeout_s + DEADLINE_GRACE_S
    trace = current()
    sending = trace.context.child() if trace is not None else None
    began = now() if sending is not None else 0
    message = write_online(
        request_id,
        asked.url,
        asked.body,
        queue=queue,
        priority=asked.priority,
        tenant=caller.tenant,
        deadline=time.time() + online.models.clock_ahead + lasts_s,
        keep_ms=KEEP_ONCE_MS if once else KEEP_MS,
        listener=waiting.name if listens else "",
        trace=sending.headers() if sending is not None else None,
        sequences=asked.sequences,
    )
    list_key = turn_list(queue, asked.priority, caller.tenant)
    push = Push(list_key, request_id, KEEP_ONCE_MS if once else None, message)
    waiter = await waiting.ask(push, listens=listens, queued=queued)
    if trace is not None and sending is not None:
        trace.queued(sending, queue, request_id, began)
    return waiter


async def _answer(
    asked: OnlineRequest, waiter: Waiter, online: OnlineState, allowance: Allowance, began: float,
    receive: Receive, send: Send,
) -> bytes | None:  # fmt: skip
    """Answer a request that was queued; return the answer, None if there is none."""
    lasts_s = STREAM_S if asked.stream else online.timeout_s
    timer = asyncio.get_running_loop().call_later(lasts_s, waiter.end, TimedOut())
    watching = asyncio.create_task(_hung_up(receive, waiter))
    try:
        if asked.stream is not None:
            return await StreamedAnswer(asked, waiter, send, allowance.headers, lasts_s).run()
        body = await answer_of(waiter, lasts_s)
        if body is not None:
            told = complete_response_json(body) if asked.url == RESPONSES_URL else body
            await _send_whole(told, allowance, began, send)
        return body
    finally:
        timer.cancel()
        watching.cancel()
        online.waiting.leave(waiter)


async def _hung_up(receive: Receive, waiter: Waiter) -> None:
    """Wait until the caller hangs up; then nobody waits any more."""
    message: Message = {"type": "http.request"}
    while message["type"] != "http.disconnect":
        message = await receive()
    waiter.end(ClientGone())


async def _send_whole(body: bytes, allowance: Allowance, began: float, send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"openai-processing-ms", b"%d" % round(1000 * (time.monotonic() - began))),
        *header_pairs(allowance.headers),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# -- what it costs --------------------------------------------------------------------


class _Usage(msgspec.Struct):
    total_tokens: int | None = None
    input_tokens: int | None = None  # Anthropic's have no total
    output_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    count: int | None = None  # of /tokenize
    input_tokens: int | None = None  # of /v1/messages/count_tokens


_decode = msgspec.json.Decoder(_Answer).decode


def reported_tokens(body: bytes) -> int | None:
    """Return how many tokens an answer says it has used; None if it says nothing."""
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
    """Return the tokens of prompt and answer that a request has used, however it has ended.

    An answer says what it has used. Without one the prompt was read all the same, and text was
    written: its bytes are the most tokens that it can have, and `max_tokens` is another bound.
    `body` is its answer, None if there was none; then with `goes_on` it is computed to its end
    although nobody waits. 0 if it was not run: it was not queued, or refused for what it asks.
    """
    meta = waiter.ending.result() if waiter is not None and waiter.has_result() else None
    if body is None and meta is not None:
        body = body_of(meta)  # its client went, or it was not the text that was sent
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
        written = most  # nobody can say how much of it was written
    return asked.prompt_tokens + (min(written, most) if most else written)


def _was_run(meta: bytes) -> bool:
    """Whether an engine had a request that failed; what it refuses has cost nothing."""
    timing = (read_meta(meta).get("warmq") or {}).get("timing")
    return bool(timing) and not isinstance(error_of(meta), RequestRejected)


# -- routes ---------------------------------------------------------------------------


async def _models(request: Request) -> Response:
    online: OnlineState = request.app.state.online
    return reply(ModelList(await online.models.every(caller(request).models)))


async def _model(request: Request) -> Response:
    online: OnlineState = request.app.state.online
    name = request.path_params["model"]
    return reply(await online.models.one(name, caller(request).models))


def routes() -> list[Route]:
    """Return the routes: one for each URL whose bodies are known, and those of models."""
    return [
        *(Route(url, Endpoint(url), methods=["POST"]) for url in ONLINE_BODY_TYPES),
        Route("/v1/models", _models),
        Route("/v1/models/{model:path}", _model),
    ]
