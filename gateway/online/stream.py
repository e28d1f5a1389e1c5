"""One streamed answer, from the first text to the last event."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import orjson
from starlette.types import Send

from contract.errors import WarmqError
from contract.streaming import texts_of
from gateway.http.errors import ApiError, of_warmq, stopping
from gateway.online.answer import answer_of, header_pairs
from gateway.online.asked import Asked
from gateway.online.events.texts import Texts
from gateway.online.events.writer import WAITING, events_of
from gateway.online.waiter import Waiter

#: A stream that had nothing to say for so long, in seconds, shows that it lives: also between two
#: texts, when its request waits to be run again.
WAITING_S = 10.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Stream:
    """One streamed answer. Its status is sent with the first text, or with the first sign of life:
    what is wrong before has a status of its own."""

    def __init__(
        self, asked: Asked, waiter: Waiter, send: Send, headers: Mapping[str, str], lasts_s: float
    ) -> None:
        self._waiter, self._send, self._lasts_s = waiter, send, lasts_s
        self._headers = [*_HEADERS, *header_pairs(headers)]
        self._events = events_of(asked, waiter.request_id)
        self._texts = Texts()
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
            told = error if isinstance(error, ApiError) else of_warmq(error)
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
            raise stopping() from None

    async def _wait_for_news(self) -> None:
        try:
            async with asyncio.timeout(WAITING_S):
                await self._news.wait()
        except TimeoutError:
            await self._write([WAITING])

    async def _send_texts(self) -> None:
        pieces, self._waiter.pieces = self._waiter.pieces, []
        if pieces and (new := list(self._texts.take(pieces))):
            await self._write([self._events.text(choice, text) for choice, text in new])

    def _last(self, raw: bytes) -> Iterable[bytes]:
        body = orjson.loads(raw)
        texts = texts_of(body)
        if not self._texts.continued_by(texts):
            raise ApiError(
                503,
                "the request was run again and wrote another text than the one that was sent; send "
                "it again",
                code="stream_broken",
            )
        return self._events.last(body, self._texts.sent)

    async def _write(self, events: Iterable[bytes], *, more: bool = True) -> None:
        data = b"".join(events)
        if not self._started:
            self._started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": self._headers}
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
