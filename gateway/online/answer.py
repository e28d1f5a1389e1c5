"""How a caller is answered: vLLM's bytes as they were stored, events as they come, or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import orjson
from starlette.types import Send

from contract.errors import RequestRejected, WarmqError
from contract.openai.body import MESSAGES_URL, RESPONSES_URL
from contract.results import body_of, error_of
from contract.streaming import Piece, Transcript, texts_of
from gateway.http.errors import ApiError, api_error, gateway_stops
from gateway.online.events.chunks import ChunkEvents
from gateway.online.events.messages import MessageEvents
from gateway.online.events.responses import MALFORMED_ANSWER, ResponseEvents
from gateway.online.pending import ClientGone, TimedOut, Waiter
from gateway.online.request import OnlineRequest


async def answer_of(waiter: Waiter, lasts_s: float) -> bytes | None:
    """Return the response's JSON; None if the caller has gone.

    Raises:
        ApiError, StoreUnavailable: why there is none.
    """
    try:
        meta = await waiter.ending
    except asyncio.CancelledError:
        raise gateway_stops() from None
    except ClientGone:
        return None
    except TimedOut:
        raise _late(lasts_s) from None
    body = body_of(meta)
    if body is None:
        raise _of_result(error_of(meta), lasts_s)
    return body


def header_pairs(headers: Mapping[str, str]) -> Iterable[tuple[bytes, bytes]]:
    """Return headers as ASGI takes them."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _late(lasts_s: float) -> ApiError:
    return ApiError(
        503,
        f"no answer within {lasts_s:g} s, the request was given up; try again later, or send it "
        "in a batch",
        code="request_timeout",
        after_s=5,
    )


def _of_result(error: WarmqError, lasts_s: float) -> ApiError:
    """Return the answer for a request that ended without a response."""
    if isinstance(error, RequestRejected) and error.field:
        error.field = error.field.removeprefix("body.")
    elif error.code == "expired":
        return _late(lasts_s)
    elif error.code in ("poison", "result_too_large", "result_refused"):
        return ApiError(500, error.message, code=error.code, retry=False)
    elif error.code == "cancelled":
        return ApiError(503, "the request was cancelled", code=error.code, retry=False)
    return api_error(error)


class SentText:
    """What was sent of each choice, and what its latest attempt has written.

    A request that runs again writes a text of its own. What was sent stays sent: its text goes on
    once it has caught up with that, if it begins with the same words.
    """

    def __init__(self) -> None:
        self.sent: dict[int, str] = {}
        self._written = Transcript()

    def take(self, pieces: Iterable[Piece]) -> Iterator[tuple[int, str]]:
        """Yield (choice, text) to be sent now; where a piece is missing, the result has it."""
        changed = dict.fromkeys(p.choice for p in pieces if self._written.add(p) is not None)
        for choice in changed:
            sent, text = self.sent.get(choice, ""), self._written.texts.get(choice, "")
            if len(text) > len(sent) and text.startswith(sent):
                self.sent[choice] = text
                yield choice, text[len(sent) :]

    def continued_by(self, texts: dict[int, str]) -> bool:
        """Whether an answer's texts begin with what was sent."""
        return all(texts.get(n, "").startswith(sent) for n, sent in self.sent.items())


#: A comment: clients skip it, and no proxy takes the connection for a dead one.
KEEP_ALIVE_COMMENT = b": waiting\n\n"


class EventWriter(Protocol):
    """Writes the events of one answer."""

    def text(self, choice: int, piece: str) -> bytes:
        """Return the events for the next piece of one choice's text."""

    def last(self, body: Mapping[str, Any], sent: Mapping[int, str]) -> Iterator[bytes]:
        """Yield the rest of an answer; `sent` is by choice the text that was sent of it."""

    def broken(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error."""


def event_writer(asked: OnlineRequest, request_id: str) -> EventWriter:
    """Return what writes the events of one request."""
    if asked.url == MESSAGES_URL:
        return MessageEvents(asked, request_id)
    if asked.url == RESPONSES_URL:
        return ResponseEvents(asked, request_id)
    return ChunkEvents(asked, request_id)


#: A stream that had nothing to say for so long, in seconds, shows that it lives: also between two
#: texts, when its request waits to be run again.
WAITING_S = 10.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class StreamedAnswer:
    """One streamed answer. Its status is sent with the first text, or with the first sign of life:
    what is wrong before has a status of its own."""

    def __init__(
        self,
        asked: OnlineRequest,
        waiter: Waiter,
        send: Send,
        headers: Mapping[str, str],
        lasts_s: float,
    ) -> None:
        self._waiter, self._send, self._lasts_s = waiter, send, lasts_s
        self._headers = [*_HEADERS, *header_pairs(headers)]
        self._events = event_writer(asked, waiter.request_id)
        self._texts = SentText()
        self._started = False
        self._news = asyncio.Event()

    async def run(self) -> bytes | None:
        """Send events until the answer is whole; return the answer, None if there is none."""
        self._waiter.poke = self._news.set
        try:
            await self._send_while_it_is_written()
            body = await answer_of(self._waiter, self._lasts_s)
            if body is not None:
                await self._write(self._last(body), more=False)
        except (ApiError, WarmqError) as error:
            if not self._started:
                raise
            told = api_error(error)
            await self._write([self._events.broken(told)], more=False)
            return None
        return body

    async def _send_while_it_is_written(self) -> None:
        try:
            while not self._waiter.ending.done():
                await self._wait_for_news()
                self._news.clear()
                await self._send_texts()
        except asyncio.CancelledError:
            raise gateway_stops() from None

    async def _wait_for_news(self) -> None:
        try:
            async with asyncio.timeout(WAITING_S):
                await self._news.wait()
        except TimeoutError:
            await self._write([KEEP_ALIVE_COMMENT])

    async def _send_texts(self) -> None:
        pieces, self._waiter.pieces = self._waiter.pieces, []
        if pieces and (new := list(self._texts.take(pieces))):
            await self._write([self._events.text(choice, text) for choice, text in new])

    def _last(self, raw: bytes) -> Iterable[bytes]:
        try:
            body = orjson.loads(raw)
            self._check(texts_of(body))
            return list(self._events.last(body, self._texts.sent))
        except MALFORMED_ANSWER:
            told = "another program wrote the answer of this request, in a form that nobody reads"
            raise ApiError(500, told, code="request_failed", retry=False) from None

    def _check(self, texts: dict[int, str]) -> None:
        if not self._texts.continued_by(texts):
            raise ApiError(
                503,
                "the request was run again and wrote another text than the one that was sent; send "
                "it again",
                code="stream_broken",
            )

    async def _write(self, events: Iterable[bytes], *, more: bool = True) -> None:
        data = b"".join(events)
        if not self._started:
            self._started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": self._headers}
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
