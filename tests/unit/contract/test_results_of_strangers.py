"""Whatever stands where a result should be: all who read it read a failure, and none breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from kit.protocol.lessee import celery_message

from contract.errors import RequestFailed, RequestRejected, WarmqError
from contract.message import read_delivery
from contract.results import (
    OUTCOMES,
    body_of,
    error_of,
    failure_meta,
    outcome_of,
    read_meta,
    result_line,
    stored_line,
    success_meta,
)
from contract.streaming import Listener, texts_of

JUNK: list[Any] = [None, True, 7, -1, 2**63, 1.5, "x", [], ["x"], [7], {}, {"a": 1}, [[{}]]]
BODIES: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "message": {"content": "hi"}}], "usage": {"completion_tokens": 5}},
    {"choices": [{"text": "hi"}]},
    {"type": "message", "content": [{"type": "text", "text": "hi"}]},
    {"object": "response", "output": [{"type": "message", "content": [{"text": "hi"}]}]},
]


def metas() -> Iterator[dict[str, Any]]:
    """Yield what warmq writes."""
    ours = {"batch": "b1", "created": "5", "custom_id": "c7", "line": 7}
    delivery = read_delivery("w/1", celery_message("t0", warmq=ours))
    for body in BODIES:
        yield orjson.loads(success_meta(delivery, orjson.dumps(body), {"attempts": 2}))
    for error in (RequestFailed("x", code="expired"), RequestRejected("bad", field="body.n")):
        yield orjson.loads(failure_meta("t0", error, custom_id="c7", line=7, timing={"a": 1.5}))


def changed(value: Any) -> Iterator[Any]:
    """Yield a value with each of its parts replaced by junk, or gone."""
    yield from JUNK
    if isinstance(value, dict):
        for name, part in value.items():
            yield {key: one for key, one in value.items() if key != name}
            yield from ({**value, name: other} for other in changed(part))
    elif isinstance(value, list):
        for n, part in enumerate(value):
            yield from ([*value[:n], other, *value[n + 1 :]] for other in changed(part))


def deep(levels: int) -> Iterator[bytes]:
    """Yield metas with so deep a part."""
    for begin, end in ((b"[", b"]"), (b'{"a":', b"}")):
        part = begin * levels + b"7" + end * levels
        for before in (
            b'"result":', b'"warmq":', b'"result":{},"warmq":{"timing":{}},"x":',
            b'"result":{},"warmq":', b'"warmq":{"error":', b'"warmq":{"line":',
        ):  # fmt: skip
            yield b'{"status":"SUCCESS",' + before + part + b"}" * (1 + before.count(b'warmq":{'))
        yield part


RAW = [
    b"", b"x", b"\xff", b"{", b'{"status":"REVOKED","warmq":7}', b'{"status":"SUCCESS"}',
    b'{"status":"SUCCESS","result":"\xff","warmq":{"timing":{}}}',
    *(orjson.dumps(other) for meta in metas() for other in changed(meta)),
    *(raw for levels in (250, 300, 900, 1010, 1100, 100_000) for raw in deep(levels)),
]  # fmt: skip


def test_every_reader_of_a_stored_result_takes_anything() -> None:
    for raw in RAW:
        meta = read_meta(raw)
        assert outcome_of(meta) in OUTCOMES
        orjson.dumps(meta)
        error = error_of(raw)
        assert isinstance(error, WarmqError) and isinstance(error.message, str)
        assert isinstance(getattr(error, "field", None), str | None)
        assert isinstance(body_of(raw), bytes | None)
        assert isinstance(orjson.loads(result_line("t0", "c7", 7, raw).json), dict)
        assert isinstance(orjson.loads(result_line("t0", "c7", 7, raw, "t1").json), dict)
        own = stored_line("t0", raw)
        if own is not None:
            line = orjson.loads(own.json)
            assert isinstance(line["custom_id"], str)
            assert isinstance((line["error"] or line["warmq"])["line"], int)
            assert own.failed or line["response"]["status_code"] == 200
        texts = texts_of(meta.get("result"))
        assert all(type(n) is int and isinstance(one, str) for n, one in texts.items())


def test_what_warmq_writes_is_read_as_it_is() -> None:
    for meta in metas():
        assert read_meta(orjson.dumps(meta)) == meta


@pytest.mark.parametrize(
    ("raw", "outcome"),
    [
        (b'{"status":"REVOKED","warmq":7}', "failed"),
        (b'{"status":"SUCCESS","warmq":7}', "completed"),
        (b"[" * 2000, "failed"),
    ],
)
def test_a_listener_takes_whatever_is_published_as_a_result(raw: bytes, outcome: str) -> None:
    listener = Listener(None, ["a"])
    assert [*listener._receive("celery-task-meta-a", raw)] == []
    assert listener.transcripts["a"].ended == outcome


def test_one_part_that_nobody_can_read_takes_no_other_with_it() -> None:
    raw = failure_meta("t0", RequestFailed("late", code="expired"), custom_id="c7", line=7)
    meta = orjson.loads(raw)
    meta["warmq"] |= {"custom_id": 7, "timing": {"attempts": "x"}}
    raw = orjson.dumps(meta)
    assert outcome_of(read_meta(raw)) == "expired"
    assert error_of(raw).message == "late"
