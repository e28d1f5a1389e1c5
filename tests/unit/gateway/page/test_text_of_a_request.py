"""The page's text of one request: that it has ended is told, whoever missed the news of it. What
another program wrote as its result is shown, too."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from contract.errors import StoreUnavailable
from contract.streaming import Piece, Transcript
from gateway.http.caller import Caller
from gateway.page import live
from gateway.page.live import LiveText
from gateway.page.requests import _done_at, _result_fields, text_of

DONE = b'{"status":"SUCCESS","result":{}}'


class Deaf:
    """A listener to which nothing is told, and a store of results; by request id."""

    def __init__(self, *request_ids: str) -> None:
        self.transcripts = {request_id: Transcript() for request_id in request_ids}
        self.stored: dict[str, bytes] = {}
        self.subscribed = self.away = False
        self.asked = 0

    def read(self, wait_s: float) -> list[Piece]:
        self.subscribed = True
        return []

    def results(self, request_ids: Sequence[str]) -> list[bytes | None]:
        assert self.subscribed  # else a result between the two would be missed
        self.asked += 1
        if self.away:
            raise StoreUnavailable("Redis is away")
        return [self.stored.get(request_id) for request_id in request_ids]


def text_by(listener: Deaf) -> LiveText:
    """Return the page's text of a request that this listener hears."""
    services: Any = SimpleNamespace(batches=listener)
    made = LiveText(services, Caller(), "batch", "request")
    made._listener = listener  # type: ignore[assignment]
    return made


async def told(text: LiveText) -> dict[str, Any] | None:
    """Return what is told by now, None for nothing."""
    events = await text.news()
    return orjson.loads(events[0].partition(b"data: ")[2]) if events else None


async def test_a_request_that_ended_before_anybody_listened_has_ended() -> None:
    listener = Deaf("a")
    listener.stored["a"] = DONE
    assert await told(text_by(listener)) == {"attempt": 0, "text": "", "ended": "completed"}


async def test_an_end_that_nobody_heard_is_found_and_then_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "CHECK_S", 0.0)
    listener = Deaf("a")
    text = text_by(listener)
    listener.transcripts["a"].add(Piece("a", 2, 0, 0, "Once"))
    assert await told(text) == {"attempt": 2, "text": "Once", "ended": ""}
    listener.away = True
    assert await told(text) is None
    listener.away, listener.stored["a"] = False, DONE
    assert await told(text) == {"attempt": 2, "text": "Once", "ended": "completed"}
    asked = listener.asked
    assert await told(text) is None
    assert listener.asked == asked


async def test_a_look_at_every_text_would_be_too_many() -> None:
    listener = Deaf("a")
    text = text_by(listener)
    for _ in range(10):
        await told(text)
    assert listener.asked == 1


@pytest.mark.parametrize("ids", [("a", "b"), ("b", "a")])
async def test_of_several_models_the_end_is_told_of_the_one_that_has_the_request(
    ids: tuple[str, ...],
) -> None:
    listener = Deaf(*ids)
    text = text_by(listener)
    assert await told(text) is None
    listener.transcripts["b"].ended = "failed"  # without any text
    assert await told(text) == {"attempt": 0, "text": "", "ended": "failed"}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"status":"REVOKED","warmq":7}',
        b'{"status":"SUCCESS","result":7,"warmq":{"timing":{"attempts":"x"}}}',
        b'{"status":"SUCCESS","result":{"choices":7,"usage":7}}',
        b'{"status":"SUCCESS","result":{"usage":{"completion_tokens":"x"}},"warmq":{"error":7}}',
        b'{"status":"FAILURE","date_done":"0001-01-01","warmq":{"custom_id":{}}}',
        b'{"status":"SUCCESS","result":{"a":' + 300 * b"[" + 300 * b"]" + b"}}",
    ],
)
def test_whatever_stands_where_a_result_should_be_is_shown(raw: bytes) -> None:
    told = _result_fields(raw)
    assert isinstance(told["attempts"], int | float | None)
    assert isinstance(told["tokens"], int | None)
    assert isinstance(told["error"], dict)
    assert isinstance(text_of(told["body"]), str)
    assert isinstance(_done_at(told["meta"]), float | None)
