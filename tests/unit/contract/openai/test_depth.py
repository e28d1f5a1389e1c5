"""A text is as deep as orjson reads it, on each release of Python."""

from __future__ import annotations

import orjson
import pytest
from kit.hostile.hostile_request import deep
from msgspec import Struct

from contract.openai.decode import MAX_DEPTH, may_be_too_deep
from gateway.batches.api.protocol import BatchCreate
from gateway.http.errors import ApiError
from gateway.http.json_api import read

READ = 1024


class Nothing(Struct):
    """A body of which no field is read."""


@pytest.mark.parametrize(
    "opening, closing", [(b"[", b"]"), (b'{"a":', b"}"), (b'[0, {"a":', b"}]")]
)
def test_what_orjson_reads_no_more_may_be_too_deep(opening: bytes, closing: bytes) -> None:
    levels = READ // opening.count(b"[") if opening[:1] == b"[" else READ
    for depth in (levels + 1, 5 * levels):
        text = deep(depth, opening, closing)
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(text)
        assert may_be_too_deep(text)
        assert may_be_too_deep(text + b" " * 9999)
        assert may_be_too_deep(b" " * 9999 + text)


@pytest.mark.parametrize("size", [0, 10, 3000, 100_000])
def test_what_has_few_brackets_is_not(size: int) -> None:
    assert not may_be_too_deep(deep(MAX_DEPTH))
    assert not may_be_too_deep(orjson.dumps({"messages": [{"content": "x" * size}] * 9}))


def test_a_deep_field_that_is_not_read_makes_a_body_too_deep() -> None:
    read(b'{"x":' + deep(READ // 2) + b"}", Nothing)
    read(b'{"x":[' + b"[]," * 5000 + b"[]]}", Nothing)
    asked = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}
    for depth in (READ, 5 * READ, 100_000):
        for body, shape in ((b"{", Nothing), (orjson.dumps(asked)[:-1] + b",", BatchCreate)):
            with pytest.raises(ApiError) as raised:
                read(body + b'"x":' + deep(depth) + b"}", shape)
            assert (raised.value.status, raised.value.code) == (400, "invalid_json")
