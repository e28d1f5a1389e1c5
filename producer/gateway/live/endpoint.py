"""One online request from its body to its answer: an ASGI application for each URL."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.types import Message, Receive, Scope, Send

from contract.errors import RequestRejected, WarmqError
from contract.message import write_online
from contract.naming import turn_list
from contract.redis.gateway.live import Push
from contract.results import body_of, error_of
from contract.streaming import texts_of
from producer.gateway.caller import Caller
from producer.gateway.errors import ApiError, of_warmq
from producer.gateway.live.asked import Asked, read
from producer.gateway.live.chunks import WAITING, Chunks, broken
from producer.gateway.live.online import Online
from producer.gateway.live.texts import Texts
from producer.gateway.live.waiting import Gone, Late, Waiter

#: How long results are kept: for a gateway whose connection was lost, and for whoever asks again
#: with the same Idempotency-Key.
KEEP_MS, KEEP_ONCE_MS = 120_000, 86_400_000
#: A request that nobody waits for any more, because its gateway died, does not begin later than so
#: long after its time.
DEADLINE_GRACE_S = 10.0
#: A stream may take so long in all; it shows that it lives.
STREAM_S = 3600.0
#: Pause between two signs of life of a stream that waits for its first text.
WAITING_S = 10.0
#: Request ids of Idempotency-Keys are made in this namespace.
_ONCE = uuid.UUID("4f0d8d6a-6a0c-5b3f-9f0e-1a2a2f3c9b77")
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Endpoint:
    """Answers POSTs to one URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        began = time.monotonic()
        online: Online = scope["app"].state.online
        caller: Caller = scope["warmq.caller"]
        raw = await _body(receive)
        if raw is None:
            return
        asked = read(self._url, raw, caller.highest_priority)
        waiter = await _ask(online, asked, caller, scope.get("warmq.idempotency", ""))
        watching = asyncio.create_task(_hung_up(receive, waiter))
        timeout_s = STREAM_S if asked.stream else online.timeout_s
        timer = asyncio.get_running_loop().call_later(timeout_s, waiter.end, Late())
        try:
            if asked.stream is None:
                await _whole(waiter, send, began, timeout_s)
            else:
                await _Stream(asked, waiter, send, timeout_s).run()
        finally:
            timer.cancel()
            watching.cancel()
            online.waiting.leave(waiter)


async def _body(receive: Receive) -> bytes | None:
    """Return the whole body; None if the caller hangs up before its end."""
    message = await receive()
    if message["type"] != "http.request":
        return None
    if not message.get("more_body", False):
        return message.get("body", b"")  # type: ignore[no-any-return]
    parts = [message.get("body", b"")]
    while message.get("more_body", False):
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
    return b"".join(parts)


async def _hung_up(receive: Receive, waiter: Waiter) -> None:
    """Wait until the caller hangs up; then nobody waits any more."""
    message: Message = {"type": "http.request"}
    while message["type"] != "http.disconnect":
        message = await receive()
    waiter.end(Gone())


async def _ask(online: Online, asked: Asked, caller: Caller, once: str) -> Waiter:
    queue = await online.models.queue_of(asked.model, caller.models)
    waiting = online.waiting
    request_id = f"once-{uuid.uuid5(_ONCE, once)}" if once else waiting.new_id()
    lasts_s = STREAM_S if asked.stream else online.timeout_s + DEADLINE_GRACE_S
    message = write_online(
        request_id,
        asked.url,
        asked.body,
        queue=queue,
        priority=asked.priority,
        tenant=caller.tenant,
        deadline=time.time() + online.models.clock_ahead + lasts_s,
        keep_ms=KEEP_ONCE_MS if once else KEEP_MS,
        listener=waiting.name if asked.by_text else "",
    )
    list_key = turn_list(queue, asked.priority, caller.tenant)
    push = Push(list_key, request_id, KEEP_ONCE_MS if once else None, message)
    return await waiting.ask(push, listens=asked.by_text)


async def _whole(waiter: Waiter, send: Send, began: float, timeout_s: float) -> None:
    body = await _answer(waiter, timeout_s)
    if body is None:
        return
    took_ms = round(1000 * (time.monotonic() - began))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"openai-processing-ms", b"%d" % took_ms),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _answer(waiter: Waiter, timeout_s: float) -> bytes | None:
    """Return the response's JSON; None if the caller has gone.

    Raises:
        ApiError, StoreUnavailable: why there is none.
    """
    try:
        meta = await waiter.ending
    except Gone:
        return None
    except Late:
        raise _late(timeout_s) from None
    body = body_of(meta)
    if body is None:
        raise _of_result(error_of(meta), timeout_s)
    return body


def _late(timeout_s: float) -> ApiError:
    return ApiError(
        503,
        f"no answer within {timeout_s:g} s, the request was given up; try again later, or send it "
        "in a batch",
        code="request_timeout",
        after_s=5,
    )


def _of_result(error: WarmqError, timeout_s: float) -> ApiError:
    """Return the answer for a request that ended without a response."""
    if isinstance(error, RequestRejected) and error.field:
        error.field = error.field.removeprefix("body.")
    elif error.code == "expired":
        return _late(timeout_s)
    elif error.code in ("poison", "result_too_large", "result_refused"):
        return ApiError(500, error.message, code=error.code, retry=False)
    elif error.code == "cancelled":
        return ApiError(503, "the request was cancelled", code=error.code, retry=False)
    return of_warmq(error)


class _Stream:
    """One streamed answer. Its status is sent with the first text, or with the first sign of life:
    what is wrong before has a status of its own."""

    def __init__(self, asked: Asked, waiter: Waiter, send: Send, timeout_s: float) -> None:
        self._asked, self._waiter, self._send = asked, waiter, send
        self._timeout_s = timeout_s
        self._chunks = Chunks(asked, waiter.request_id)
        self._texts = Texts()
        self._started = False
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Send events until the answer is whole."""
        self._waiter.poke = self._news.set
        ending = self._waiter.ending
        while not ending.done():
            await self._wait_for_news()
            self._news.clear()
            await self._send_texts()
        try:
            body = await _answer(self._waiter, self._timeout_s)
            if body is not None:
                await self._write(self._last(orjson.loads(body)), more=False)
        except (ApiError, WarmqError) as error:
            if not self._started:
                raise
            told = error if isinstance(error, ApiError) else of_warmq(error)
            await self._write([broken(told)], more=False)

    async def _wait_for_news(self) -> None:
        if self._texts.sent:
            await self._news.wait()
            return
        try:
            async with asyncio.timeout(WAITING_S):
                await self._news.wait()
        except TimeoutError:
            await self._write([WAITING])

    async def _send_texts(self) -> None:
        pieces, self._waiter.pieces = self._waiter.pieces, []
        if pieces and (new := list(self._texts.take(pieces))):
            await self._write([self._chunks.text(choice, text) for choice, text in new])

    def _last(self, body: dict[str, Any]) -> Iterable[bytes]:
        if not self._asked.by_text:
            return self._chunks.last(body, {})
        texts = texts_of(body)
        if not self._texts.continued_by(texts):
            raise ApiError(
                503,
                "the request was run again and wrote another text than the one that was sent; send "
                "it again",
                code="stream_broken",
            )
        return self._chunks.last(body, {n: self._texts.sent.get(n, "") for n in texts})

    async def _write(self, events: Iterable[bytes], *, more: bool = True) -> None:
        data = b"".join(events)
        if not self._started:
            self._started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
