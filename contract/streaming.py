"""Encodes and receives running text: the text of requests while they run, over Redis's pub/sub.

Workers publish it; a listener is a process that reads it on its own channel, `warmq:text:<name>`.
Each publication is a JSON list of pieces (`Piece`) with their positions. A gateway is named as the
listener in its requests' messages (`headers.warmq.listener`). Any other listener publishes a
subscription (`listen_request`) on `warmq:listen`, and gets the texts from their beginning. So does
a listener that was disconnected or misses a piece. Redis keeps no text: the result, published on
Celery's channel, ends the text and has all of it.
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

#: Seconds that a worker keeps a subscription to a request that it does not run.
LISTEN_S = 15.0
#: Seconds until a listener subscribes again: SILENT_S without a piece of a request, MISSED_S while
#: a piece is missing. A connection without any message for SILENT_S gets a PING, and is closed
#: if no answer comes within SILENT_S.
SILENT_S, MISSED_S = LISTEN_S / 3, 1.0


class Piece(NamedTuple):
    """A piece of the text of one choice, at position `at`; a rerun has a higher `attempt`."""

    request_id: str
    attempt: int
    choice: int
    at: int
    text: str


_encode = msgspec.json.Encoder().encode
_decode_pieces = msgspec.json.Decoder(list[Piece]).decode


def encode_pieces(pieces: Iterable[Piece]) -> bytes:
    """Return the pieces as one publication, a JSON list."""
    return _encode(list(pieces))


def decode_pieces(data: bytes) -> list[Piece]:
    """Return the pieces of one publication.

    Raises:
        ValueError: `data` is not a publication.
    """
    try:
        return _decode_pieces(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def listen_request(listener: str, request_ids: Iterable[str], *, raw: bool = False) -> bytes:
    """Return a subscription to these requests' texts.

    A worker keeps it while the request runs there, else for LISTEN_S. With `raw` the listener also
    gets text of which parts may become tool calls or reasoning instead of the answer.
    """
    message = {"listener": listener, "ids": list(request_ids)}
    return orjson.dumps(message | {"raw": True} if raw else message)


def texts_of(body: object) -> dict[int, str]:
    """Return the text of each choice in a response body, {} for any other value."""
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
        # The content of Mistral's reasoning models is a list of thoughts and texts.
        text = _joined(content) if isinstance(content, list) else str(content)
        index = choice.get("index")
        texts[index if type(index) is int else number] = text
    return texts


def _joined(parts: Iterable[Any]) -> str:
    return "".join(part.get("text") or "" for part in parts if isinstance(part, dict))


class Transcript:
    """The text of one request by choice (`texts`), joined from its pieces.

    `restarts` counts how often a text began again: that of all choices with a new attempt, or that
    of one because the engine changed it. `gaps` has the choices of which a piece is missing.
    `ended` is the request's outcome, '' while it runs.
    """

    def __init__(self) -> None:
        self.attempt = self.restarts = 0
        self.texts: dict[int, str] = {}
        self.gaps: set[int] = set()
        self.ended = ""

    def add(self, piece: Piece) -> Piece | None:
        """Add a piece; return its new part, or None. Ignore pieces of an older attempt."""
        _, attempt, choice, at, text = piece
        have = self.texts.get(choice, "")
        if attempt == self.attempt and 0 < at == len(have):  # the case of nearly all pieces
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
        if have.startswith(whole):  # after a subscription a piece may come twice
            return None
        if not whole.startswith(have):
            self.ended, have = "", ""
            self.restarts += 1
        self.texts[choice] = whole
        return Piece(piece.request_id, attempt, choice, len(have), whole[len(have) :])


class Listener:
    """Receives the running text of some requests; for one thread, which must `close` it.

    Each call raises StoreUnavailable if Redis cannot be used.
    """

    def __init__(self, client: Any, request_ids: Iterable[str]) -> None:
        """Prepare, without a connection yet."""
        self.transcripts = {request_id: Transcript() for request_id in request_ids}
        self._client = client
        self._name = secrets.token_hex(8)
        self._pubsub: Any = None
        #: The time.monotonic() of the last subscription to each request.
        self._subscribed_at: dict[str, float] = {}
        #: The time.monotonic() at which the last piece of each request was received.
        self._received: dict[str, float] = {}
        #: The times of the last message on the connection, and of the last PING.
        self._active_at = self._pinged_at = 0.0

    def read(self, wait_s: float) -> list[Piece]:
        """Return new pieces; wait for them, or for a result, at most `wait_s`."""
        if self._pubsub is None:
            self._pubsub = self._open_pubsub()
            self._subscribed_at.clear()  # pieces were missed: subscribe to all requests again
            self._active_at = time.monotonic()
        self._publish_subscription(time.monotonic())
        new: list[Piece] = []
        try:
            message = self._pubsub.get_message(timeout=wait_s)
            while message is not None:
                self._active_at = time.monotonic()
                if message["type"] == "message":
                    new += self._receive(message["channel"].decode(), message["data"])
                message = self._pubsub.get_message()
            self._check_connection(time.monotonic())
        except StoreUnavailable:
            self.close()  # redis-py would reconnect, but its subscriptions might be refused then
            raise
        return new

    def _publish_subscription(self, now: float) -> None:
        """Publish a subscription to the requests that need one now."""
        due = [name for name in self.transcripts if now >= self._subscribe_at(name)]
        if due:
            message = listen_request(self._name, due, raw=True)
            self._client.publish(naming.LISTEN_CHANNEL, message)
            self._subscribed_at |= dict.fromkeys(due, now)

    def _check_connection(self, now: float) -> None:
        """Close a connection that does not answer a PING; the next read opens a new one."""
        if self._pinged_at > self._active_at:
            if now >= self._pinged_at + SILENT_S:
                self.close()
        elif now >= self._active_at + SILENT_S:
            self._pubsub.ping()
            self._pinged_at = now

    def _subscribe_at(self, request_id: str) -> float:
        """Return the time at which to subscribe to a request again."""
        subscribed_at = self._subscribed_at.get(request_id)
        if subscribed_at is None:
            return 0.0
        if self.transcripts[request_id].gaps:
            return subscribed_at + MISSED_S
        return max(subscribed_at, self._received.get(request_id, 0.0)) + SILENT_S

    def _open_pubsub(self) -> Any:
        """Return a pub/sub connection that receives all publications from now on."""
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
        """Close the connection; a later `read` opens a new one."""
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            pubsub.close()
