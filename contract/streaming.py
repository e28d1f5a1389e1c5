"""The text of running requests, published by a worker and read by listeners.

A listener is a process with one channel, `warmq:text:<name>`. Each publication is a JSON list of
pieces (`Piece`) with their positions. A gateway names itself in its requests' messages
(`headers.warmq.listener`); other listeners, and one that was disconnected or misses a piece,
publish a subscription on `warmq:listen` (`listen_request`) and get the texts from their start.
Redis keeps nothing: the result, published on Celery's channel, has the whole text and is the end.
"""

import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import orjson

from contract import naming
from contract.errors import StoreUnavailable, StoreUnreachable
from contract.results import outcome_of, read_meta

#: Seconds for which a worker keeps a subscription to a request that it does not run.
LISTEN_S = 15.0
#: A listener subscribes again after SILENT_S without news of a request, and every MISSED_S while it
#: misses a piece. A connection that is silent for SILENT_S gets a PING, and is given up after as
#: long again.
SILENT_S, MISSED_S = LISTEN_S / 3, 1.0


class Piece(NamedTuple):
    """A piece of one choice's text, at position `at`; a rerun has a higher `attempt`."""

    request_id: str
    attempt: int
    choice: int
    at: int
    text: str


_encode = msgspec.json.Encoder().encode
_decode_pieces = msgspec.json.Decoder(list[Piece]).decode


def encode_pieces(pieces: Iterable[Piece]) -> bytes:
    """Return the publication of these pieces."""
    return _encode(list(pieces))


def decode_pieces(data: bytes) -> list[Piece]:
    """Return the pieces of one publication.

    Raises:
        ValueError: it is none.
    """
    try:
        return _decode_pieces(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def listen_request(listener: str, request_ids: Iterable[str], *, raw: bool = False) -> bytes:
    """Return a subscription to these texts, which holds for LISTEN_S or while the request runs.

    With `raw` it includes text that becomes more than the answer: tool calls, reasoning.
    """
    message = {"listener": listener, "ids": list(request_ids)}
    return orjson.dumps(message | {"raw": True} if raw else message)


def texts_of(body: object) -> dict[int, str]:
    """Return the text of each choice in a response body, none for another value."""
    if isinstance(body, dict):
        with suppress(AttributeError, TypeError, RecursionError):
            return _texts_of(body)
    return {}


def _texts_of(body: Mapping[str, Any]) -> dict[int, str]:
    parts = body.get("content") if body.get("type") == "message" else None
    if body.get("object") == "response":
        messages = (part for part in body.get("output") or () if part.get("type") == "message")
        parts = [part for message in messages for part in message.get("content") or ()]
    if parts is not None:
        return {0: _joined(parts)}
    texts = {}
    for number, choice in enumerate(body.get("choices") or ()):
        content = (choice.get("message") or choice).get("content") or choice.get("text") or ""
        # Mistral's reasoning models answer with a list of thoughts and texts.
        text = _joined(content) if isinstance(content, list) else str(content)
        index = choice.get("index")
        texts[index if type(index) is int else number] = text
    return texts


def _joined(parts: Iterable[Any]) -> str:
    return "".join(part.get("text") or "" for part in parts if isinstance(part, dict))


class Transcript:
    """The text of one request, made of its pieces: `texts` by choice.

    `restarts` counts how often a text began anew: all choices with another attempt, or one because
    the engine wrote another. A choice in `gaps` misses a piece. `ended` is the outcome, '' while it
    runs.
    """

    def __init__(self) -> None:
        self.attempt = self.restarts = 0
        self.texts: dict[int, str] = {}
        self.gaps: set[int] = set()
        self.ended = ""

    def add(self, piece: Piece) -> Piece | None:
        """Take in a piece; return what of it is new. Pieces of an older attempt are ignored."""
        _, attempt, choice, at, text = piece
        have = self.texts.get(choice, "")
        if attempt == self.attempt and 0 < at == len(have):  # nearly all
            self.texts[choice] = have + text
            self.gaps.discard(choice)
            return piece
        if attempt < self.attempt:
            return None
        if attempt > self.attempt:
            self.attempt, self.texts, self.ended, have = attempt, {}, "", ""
            self.gaps.clear()
            self.restarts += 1
        if at > len(have):
            self.gaps.add(choice)
            return None
        self.gaps.discard(choice)
        whole = have[:at] + text
        if have.startswith(whole):  # a piece comes twice after a subscription
            return None
        if not whole.startswith(have):
            self.ended, have = "", ""
            self.restarts += 1
        self.texts[choice] = whole
        return Piece(piece.request_id, attempt, choice, len(have), whole[len(have) :])


class Listener:
    """Receives the texts of some requests, for one thread; `close` it.

    Each call raises StoreUnavailable where Redis cannot be used.
    """

    def __init__(self, client: Any, request_ids: Iterable[str]) -> None:
        """Prepare; nothing is connected yet."""
        self.transcripts = {request_id: Transcript() for request_id in request_ids}
        self._client = client
        self._name = secrets.token_hex(8)
        self._pubsub: Any = None
        #: When each request was last subscribed to, and last received; time.monotonic().
        self._announced: dict[str, float] = {}
        self._received: dict[str, float] = {}
        #: When the connection last brought anything, and got a PING.
        self._active_at = self._pinged_at = 0.0

    def read(self, wait_s: float) -> list[Piece]:
        """Return new pieces, after waiting for them, or for the result."""
        if self._pubsub is None:
            self._pubsub = self._subscribed()
            self._announced.clear()  # earlier publications were missed
            self._active_at = time.monotonic()
        self._announce(time.monotonic())
        new: list[Piece] = []
        try:
            message = self._pubsub.get_message(timeout=wait_s)
            while message is not None:
                self._active_at = time.monotonic()
                if message["type"] == "message":
                    new += self._receive(message["channel"].decode(), message["data"])
                message = self._pubsub.get_message()
            self._check(time.monotonic())
        except StoreUnavailable:
            self.close()  # redis-py connects anew, but may be refused its subscriptions then
            raise
        return new

    def _announce(self, now: float) -> None:
        due = [request_id for request_id in self.transcripts if now >= self._due(request_id)]
        if due:
            message = listen_request(self._name, due, raw=True)
            self._client.publish(naming.LISTEN_CHANNEL, message)
            self._announced |= dict.fromkeys(due, now)

    def _check(self, now: float) -> None:
        """Give up a connection that does not answer a PING; the next read opens another."""
        if self._pinged_at > self._active_at:
            if now >= self._pinged_at + SILENT_S:
                self.close()
        elif now >= self._active_at + SILENT_S:
            self._pubsub.ping()
            self._pinged_at = now

    def _due(self, request_id: str) -> float:
        """Return when to subscribe to a request again."""
        announced = self._announced.get(request_id)
        if announced is None:
            return 0.0
        if self.transcripts[request_id].gaps:
            return announced + MISSED_S
        return max(announced, self._received.get(request_id, 0.0)) + SILENT_S

    def _subscribed(self) -> Any:
        """Return a subscription that receives all publications from now on."""
        pubsub = self._client.pubsub()
        channels = [naming.RESULT_PREFIX + request_id for request_id in self.transcripts]
        try:
            pubsub.subscribe(naming.text_channel(self._name), *channels)
            for _ in range(1 + len(channels)):
                if pubsub.get_message(timeout=LISTEN_S) is None:
                    raise StoreUnreachable("Redis: no answer to SUBSCRIBE")
        except BaseException:
            pubsub.close()
            raise
        return pubsub

    def _receive(self, channel: str, data: bytes) -> Iterable[Piece]:
        if channel.startswith(naming.RESULT_PREFIX):
            request_id = channel.removeprefix(naming.RESULT_PREFIX)
            if transcript := self.transcripts.get(request_id):
                transcript.ended = outcome_of(read_meta(data))
            return
        try:
            pieces = decode_pieces(data)
        except ValueError:
            return
        now = time.monotonic()
        for piece in pieces:
            if transcript := self.transcripts.get(piece.request_id):
                self._received[piece.request_id] = now
                new = transcript.add(piece)
                if new is not None:
                    yield new

    def close(self) -> None:
        """End the subscription."""
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            pubsub.close()
