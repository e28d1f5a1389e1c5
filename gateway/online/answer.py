"""Sends answers to online requests: vLLM's stored JSON, streamed events, or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

import orjson
from starlette.types import Send

from contract.errors import RequestRejected, WarmqError
from contract.results import body_of, error_of
from contract.streaming import Piece, Transcript, texts_of
from gateway.http.errors import ApiError, api_error, gateway_stops
from gateway.online.events import MALFORMED_ANSWER, event_writer
from gateway.online.pending import ClientGone, TimedOut, Waiter
from gateway.online.request import OnlineRequest


async def answer_of(waiter: Waiter, timeout_s: float) -> bytes | None:
    """Return the answer's JSON, None if the client is gone; raise ApiError or StoreUnavailable."""
    try:
        meta = await waiter.ending
    except asyncio.CancelledError:
        raise gateway_stops() from None
    except ClientGone:
        return None
    except TimedOut:
        raise _timeout_error(timeout_s) from None
    body = body_of(meta)
    if body is None:
        raise _failure_error(error_of(meta), timeout_s)
    return body


def header_pairs(headers: Mapping[str, str]) -> Iterable[tuple[bytes, bytes]]:
    """Return headers as pairs of bytes, which ASGI needs."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _timeout_error(timeout_s: float) -> ApiError:
    message = (
        f"no answer within {timeout_s:g} s, so the request was aborted; try again later, or send "
        "it in a batch"
    )
    return ApiError(503, message, code="request_timeout", after_s=5)


def _failure_error(error: WarmqError, timeout_s: float) -> ApiError:
    """Return the error for a request that ended without a response."""
    if isinstance(error, RequestRejected) and error.field:
        error.field = error.field.removeprefix("body.")
    elif error.code == "expired":
        return _timeout_error(timeout_s)
    elif error.code in ("poison", "result_too_large", "result_refused"):
        return ApiError(500, error.message, code=error.code, retry=False)
    elif error.code == "cancelled":
        return ApiError(503, "the request was cancelled", code=error.code, retry=False)
    return api_error(error)


class SentText:
    """The text that was sent for each choice, and the latest attempt's text.

    A request that runs again writes a new text. If the new text begins with the sent one, sending
    continues as soon as the new text is longer.
    """

    def __init__(self) -> None:
        self.sent: dict[int, str] = {}
        self._written = Transcript()

    def take(self, pieces: Iterable[Piece]) -> Iterator[tuple[int, str]]:
        """Add pieces; yield (choice, text) to send. Text of lost pieces comes with the result."""
        changed = dict.fromkeys(p.choice for p in pieces if self._written.add(p) is not None)
        for choice in changed:
            sent, text = self.sent.get(choice, ""), self._written.texts.get(choice, "")
            if len(text) > len(sent) and text.startswith(sent):
                self.sent[choice] = text
                yield choice, text[len(sent) :]

    def continued_by(self, texts: dict[int, str]) -> bool:
        """Return whether an answer's texts begin with the sent ones."""
        return all(texts.get(n, "").startswith(sent) for n, sent in self.sent.items())


#: Seconds without an event after which a comment is sent, so that no proxy closes the connection,
#: and the comment, which clients ignore.
KEEP_ALIVE_S, KEEP_ALIVE_COMMENT = 10.0, b": waiting\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class StreamedAnswer:
    """Sends one streamed answer.

    The status is sent with the first event or comment, so that an earlier error has its own status.
    """

    def __init__(
        self, asked: OnlineRequest, waiter: Waiter, send: Send, headers: Mapping[str, str]
    ) -> None:
        self._waiter, self._send = waiter, send
        self._headers = [*_HEADERS, *header_pairs(headers)]
        self._events = event_writer(asked, waiter.request_id)
        self._texts = SentText()
        self._started = False
        self._changed = asyncio.Event()

    async def run(self, timeout_s: float) -> bytes | None:
        """Send events until the answer is complete; return the answer, or None."""
        self._waiter.poke = self._changed.set
        try:
            await self._send_running_text()
            body = await answer_of(self._waiter, timeout_s)
            if body is not None:
                await self._write(self._last_events(body), more=False)
        except (ApiError, WarmqError) as error:
            if not self._started:
                raise
            await self._write([self._events.broken(api_error(error))], more=False)
            return None
        return body

    async def _send_running_text(self) -> None:
        try:
            while not self._waiter.ending.done():
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await self._changed.wait()
                except TimeoutError:
                    await self._write([KEEP_ALIVE_COMMENT])
                self._changed.clear()
                pieces, self._waiter.pieces = self._waiter.pieces, []
                if pieces and (new := list(self._texts.take(pieces))):
                    await self._write([self._events.text(choice, text) for choice, text in new])
        except asyncio.CancelledError:
            raise gateway_stops() from None

    def _last_events(self, raw: bytes) -> Iterable[bytes]:
        try:
            body = orjson.loads(raw)
            if self._texts.continued_by(texts_of(body)):
                return list(self._events.last(body, self._texts.sent))
        except MALFORMED_ANSWER:
            message = "another program wrote the answer of this request, and it is malformed"
            raise ApiError(500, message, code="request_failed", retry=False) from None
        raise ApiError(
            503,
            "the request was run again, and its new text does not continue the text that was sent; "
            "send the request again",
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
