"""The live text of one request: its end is found although its event was missed. A result that
another program wrote is shown."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from contract.batch import Batch
from contract.errors import StoreUnavailable
from contract.streaming import Piece, Transcript
from gateway.http.caller import Caller
from gateway.page import live_text
from gateway.page.live_text import LiveText
from gateway.page.requests import done_at, result_fields, sample, text_of

DONE = b'{"status":"SUCCESS","result":{}}'


class Silent:
    """A listener that receives nothing, and a store of results by request id."""

    def __init__(self, *request_ids: str) -> None:
        self.transcripts = {request_id: Transcript() for request_id in request_ids}
        self.stored: dict[str, bytes] = {}
        self.subscribed = self.unreachable = False
        self.asked = 0

    def read(self, wait_s: float) -> list[Piece]:
        self.subscribed = True
        return []

    def results(self, request_ids: Sequence[str]) -> list[bytes | None]:
        assert self.subscribed  # else a result between the two would be missed
        self.asked += 1
        if self.unreachable:
            raise StoreUnavailable("Redis is unreachable")
        return [self.stored.get(request_id) for request_id in request_ids]


def text_by(listener: Silent) -> LiveText:
    """Return the live text of a request of this listener."""
    services: Any = SimpleNamespace(batches=listener)
    made = LiveText(services, Caller(), "batch", "request")
    made._listener = listener  # type: ignore[assignment]
    return made


async def event(text: LiveText) -> dict[str, Any] | None:
    """Return what is sent now, None for nothing."""
    found = await text.changed()
    return None if found is None else dict(zip(("attempt", "text", "ended"), found, strict=True))


async def test_a_request_that_ended_before_anybody_listened_has_ended() -> None:
    listener = Silent("a")
    listener.stored["a"] = DONE
    assert await event(text_by(listener)) == {"attempt": 0, "text": "", "ended": "completed"}


async def test_an_end_whose_event_was_missed_is_found_and_then_not_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_text, "CHECK_S", 0.0)
    listener = Silent("a")
    text = text_by(listener)
    listener.transcripts["a"].add(Piece("a", 2, 0, 0, "Once"))
    assert await event(text) == {"attempt": 2, "text": "Once", "ended": ""}
    listener.unreachable = True
    assert await event(text) is None
    listener.unreachable, listener.stored["a"] = False, DONE
    assert await event(text) == {"attempt": 2, "text": "Once", "ended": "completed"}
    asked = listener.asked
    assert await event(text) is None
    assert listener.asked == asked


async def test_results_are_not_looked_up_with_every_read_of_text() -> None:
    listener = Silent("a")
    text = text_by(listener)
    for _ in range(10):
        await event(text)
    assert listener.asked == 1


@pytest.mark.parametrize("ids", [("a", "b"), ("b", "a")])
async def test_of_several_models_the_end_is_that_of_the_model_with_the_request(
    ids: tuple[str, ...],
) -> None:
    listener = Silent(*ids)
    text = text_by(listener)
    assert await event(text) is None
    listener.transcripts["b"].ended = "failed"  # without any text
    assert await event(text) == {"attempt": 0, "text": "", "ended": "failed"}


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
    fields = result_fields(raw)
    assert isinstance(fields["attempts"], int | float | None)
    assert isinstance(fields["tokens"], int | None)
    assert isinstance(fields["error"], dict)
    assert isinstance(text_of(fields["body"]), str)
    assert isinstance(done_at(fields["meta"]), float | None)


def test_the_figures_of_a_batch_leave_out_known_answers() -> None:
    meta = {"status": "SUCCESS", "result": {"usage": {"completion_tokens": 3}}}
    timing = {"engine_s": 9.0, "queued_s": 5.0, "attempts": 2}
    results = [
        orjson.dumps(meta | {"warmq": {"custom_id": f"c{n}", "timing": timing} | ours})
        for n, ours in enumerate([{}, {"reused": True, "answered_by": "r"}])
    ]
    batches = SimpleNamespace(
        finished_ids=lambda *_: ["a", "b"], results=lambda ids: results[: len(ids)]
    )
    services: Any = SimpleNamespace(batches=batches)
    found = sample(services, [Batch("b1", {"completed": "2"})])
    assert found.values == {"queued_s": [5.0], "engine_s": [9.0], "tokens": [3.0]}
    assert (found.count, found.again) == (1, 1)
    assert [one["engine_s"] for one in found.last] == [9.0, None]
