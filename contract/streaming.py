"""The text of running requests: how a worker writes it for listeners, and how they read it.

There are two ways. A process that waits for many requests names itself in their messages
(`headers.warmq.listener`) and hears all their texts on one channel, `warmq:text:<its name>`: each
publication is a JSON list of pieces (`Piece`) with their positions. The result is the end: it has
the whole text, so a publication that was lost costs nothing but time. Whoever was disconnected
announces itself (`announcement`) and is told the texts from their beginning.

A client that wants a request's text publishes its id (JSON list) on `warmq:listen` and again every
LISTEN_S / 3; a worker that holds the request then writes entries to `warmq:stream:<id>`, whose
values are all text:

| event | fields | means |
|---|---|---|
| begin | attempt | the text begins; earlier entries no longer count |
| text | attempt, choice, at, text | goes to position `at` (in characters) of that choice |
| end | attempt, outcome, whole | the result is stored; whole is 1 if it is what was streamed |

Readers ignore entries of an older attempt than one seen: its worker was taken for dead. The stored
result decides: a request that ended without a worker (cancelled, expired) has no `end` entry.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from contract import naming

#: How long a worker writes after it heard of a listener, in seconds.
LISTEN_S = 15.0
#: How long the text stays after its last entry, and how many entries at most.
STREAM_TTL_MS = 600_000
STREAM_ENTRIES = 10_000

Entry = dict[str, str]


def begin(attempt: int) -> Entry:
    """Return the entry that begins an attempt's text."""
    return {"event": "begin", "attempt": str(attempt)}


def text(attempt: int, choice: int, at: int, piece: str) -> Entry:
    """Return the entry with a piece of one choice's text."""
    return {"event": "text", "attempt": str(attempt), "choice": str(choice), "at": str(at),
            "text": piece}  # fmt: skip


def end(attempt: int, outcome: str, *, whole: bool) -> Entry:
    """Return the last entry of a request."""
    return {"event": "end", "attempt": str(attempt), "outcome": outcome, "whole": str(int(whole))}


class Piece(NamedTuple):
    """A piece of one choice's text, at position `at` in characters.

    `attempt` rises when the request runs again, with a text of its own.
    """

    request_id: str
    attempt: int
    choice: int
    at: int
    text: str


def published(pieces: Iterable[Piece]) -> bytes:
    """Return what is published of these pieces."""
    return _encode(list(pieces))


def read_published(data: bytes) -> list[Piece]:
    """Return the pieces of one publication.

    Raises:
        ValueError: if it is none.
    """
    try:
        return _decode_pieces(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


_encode = msgspec.json.Encoder().encode
_decode_pieces = msgspec.json.Decoder(list[Piece]).decode


def announcement(listener: str, request_ids: Iterable[str]) -> bytes:
    """Return what a listener publishes on `warmq:listen` to be told these texts from their start.

    It counts for LISTEN_S, or as long as the worker runs the request.
    """
    return orjson.dumps({"listener": listener, "ids": list(request_ids)})


def texts_of(body: Mapping[str, Any]) -> dict[int, str]:
    """Return the text of each choice of a response body; of none where it has no choices.

    A message of Anthropic's and a response of OpenAI's have one.
    """
    parts = body.get("content") if body.get("type") == "message" else None
    if body.get("object") == "response":
        items = (item for item in body.get("output") or () if item.get("type") == "message")
        parts = [part for item in items for part in item.get("content") or ()]
    if parts is not None:
        return {0: _joined(parts)}
    texts = {}
    for number, choice in enumerate(body.get("choices") or ()):
        said = (choice.get("message") or choice).get("content") or choice.get("text") or ""
        # Mistral's reasoning models answer with a list of what they thought and said.
        text = _joined(said) if isinstance(said, list) else str(said)
        texts[choice.get("index", number)] = text
    return texts


def _joined(parts: Iterable[Any]) -> str:
    return "".join(part.get("text") or "" for part in parts if isinstance(part, dict))


class Transcript:
    """The text of one request as its entries tell it: `texts` by choice; `ended` is the outcome.

    `broken` says that a piece is missing, so that only the result has the text.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.texts: dict[int, str] = {}
        self.ended = ""
        self.broken = False

    def add(self, entry: Mapping[str, str]) -> str:
        """Take in the next entry; return what it adds to choice 0, '' for an old attempt's."""
        attempt = int(entry["attempt"])
        if attempt < self.attempt:
            return ""
        if entry["event"] == "begin":
            self.attempt, self.texts, self.ended, self.broken = attempt, {}, "", False
        elif entry["event"] == "end":
            self.ended = entry["outcome"]
        elif entry["event"] == "text":
            return self._extend(int(entry["choice"]), int(entry["at"]), entry["text"])
        return ""

    def _extend(self, choice: int, at: int, piece: str) -> str:
        have = self.texts.get(choice, "")
        if at > len(have):
            self.broken = True
        if self.broken:
            return ""
        new = piece[len(have) - at :]  # a piece may come twice: a worker lost Redis' answer
        self.texts[choice] = have + new
        return new if choice == 0 else ""


class Listener:
    """Reads one request's stream; raises StoreUnavailable where Redis cannot be used."""

    def __init__(self, client: Any, request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self._last: bytes | str = "0-0"

    def announce(self) -> None:
        """Tell all workers that somebody listens; to be repeated every LISTEN_S / 3."""
        self._client.publish(naming.LISTEN_CHANNEL, orjson.dumps([self._request_id]))

    def read(self, wait_s: float) -> Iterable[Entry]:
        """Return the entries that are new, after waiting for one; those written before count."""
        key = naming.stream_key(self._request_id)
        found = self._client.xread({key: self._last}, block=int(wait_s * 1000) or None)
        if not found:
            return []
        # RESP2 gives a list of pairs, RESP3 a dictionary of lists of lists.
        entries = next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]
        self._last = entries[-1][0]
        return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in entries]
