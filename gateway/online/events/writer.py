"""What the events of an API must be able to say, and which API a URL has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from contract.openai.messages import MESSAGES_URL
from contract.openai.responses import RESPONSES_URL
from gateway.http.errors import ApiError
from gateway.online.asked import Asked
from gateway.online.events.chunks import Chunks
from gateway.online.events.messages import MessageEvents
from gateway.online.events.responses import ResponseEvents

#: A comment: clients skip it, and no proxy takes the connection for a dead one.
WAITING = b": waiting\n\n"


class Events(Protocol):
    """Writes the events of one answer."""

    def text(self, choice: int, piece: str) -> bytes:
        """Return the events for the next piece of one choice's text."""

    def last(self, body: Mapping[str, Any], sent: Mapping[int, str]) -> Iterator[bytes]:
        """Yield the rest of an answer; `sent` is by choice the text that was sent of it."""

    def broken(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error."""


def events_of(asked: Asked, request_id: str) -> Events:
    """Return what writes the events of one request."""
    if asked.url == MESSAGES_URL:
        return MessageEvents(asked, request_id)
    if asked.url == RESPONSES_URL:
        return ResponseEvents(asked, request_id)
    return Chunks(asked, request_id)
