"""A message batch's body, taken apart as it comes: every piece size gives the same requests.

Time and memory grow with the bytes, whatever is nested in them.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.hostile.hostile import examples
from kit.hostile.hostile_request import deep

from gateway.batches.anthropic.create_body import RequestLines
from gateway.http.errors import ApiError

LONGEST = 16 * 2**20


class Written:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data: bytes) -> None:
        self.content += data


def taken(body: bytes, size: int = 65536) -> list[Any]:
    """Return the lines of a body that comes in pieces of a size."""
    written: Any = Written()
    incoming = RequestLines(written, LONGEST)
    for at in range(0, len(body), size):
        incoming.feed(body[at : at + size])
    incoming.end()
    assert incoming.written == len(written.content)
    return [orjson.loads(line) for line in written.content.splitlines()]


def refusal(body: bytes, size: int = 65536) -> str:
    with pytest.raises(ApiError) as raised:
        taken(body, size)
    assert raised.value.status in (400, 413)
    return raised.value.message


def one(number: int = 0, **params: Any) -> Any:
    asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    return {"custom_id": f"r{number}", "params": asked | params}


def with_field(value: bytes, name: bytes = b"unknown") -> bytes:
    """Return a good body with one field more."""
    return orjson.dumps({"requests": [one()]})[:-1] + b',"' + name + b'":' + value + b"}"


@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("place", ["field", "request", "params"])
def test_what_is_nested_deep_is_refused_with_little_memory(
    opening: bytes, closing: bytes, place: str
) -> None:
    nested = deep(20_000, opening, closing)
    body = {
        "field": with_field(nested),
        "request": b'{"requests":[' + nested + b"]}",
        "params": orjson.dumps({"requests": [one(x=0)]}).replace(b'"x":0', b'"x":' + nested),
    }[place]
    tracemalloc.start()
    try:
        assert "1000 levels" in refusal(body)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_a_field_may_be_nested_as_elsewhere() -> None:
    assert len(taken(with_field(deep(999)))) == 1
    assert len(taken(with_field(deep(999, b'{"a":', b"}")))) == 1


KEY = b"k" * 4_000_000


@pytest.mark.parametrize(
    "body",
    [
        with_field(b"[" + b"[]," * 100_000 + b"1]", KEY),
        with_field(b"{" + b'"a":1,' * 100_000 + b'"b":1}', KEY),
        with_field(b'"' + b"\\\\" * 10_000_000 + b'"'),
        with_field(b'"' + b"x" * 20_000_000),
        with_field(b"1" * 20_000_000),
        with_field(b"[" * 20_000_000),
        with_field(b"[" + b"[]," * 5_000_000 + b"1]"),
        b'{"requests":[],' + b'"a":1,' * 3_000_000 + b'"b":1}',
        b'{"requests":["' + b"x" * 60_000_000,
        b'{"requests":[' + b" " * 60_000_000,
    ],
    ids=["arrays", "keys", "escapes", "string", "digits", "brackets", "flat", "fields", "open",
         "blanks"],
)  # fmt: skip
def test_the_time_grows_with_the_bytes_alone(body: bytes) -> None:
    began = time.process_time()
    try:
        taken(body)
    except ApiError as error:
        assert error.status in (400, 413)
    assert time.process_time() - began < 10


AWKWARD = {
    "requests": [
        one(0, system='a "quoted" \\ text \\\\" {[', temperature=0.5),
        one(1, metadata={"}]": "[{", "☃\n": None, '"': [[], {}, [{}]]}),
    ],
    'other "requests"': [{"requests": [1]}, "x", -1.5e3, True, None, {}],
    "last": 7,
}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize("option", [None, orjson.OPT_INDENT_2])
def test_every_piece_size_gives_the_same_requests(size: int, option: int | None) -> None:
    body = orjson.dumps(AWKWARD, option=option)
    wanted: Any = AWKWARD["requests"]
    for content in (body, body + b" \r\n", body.replace(b'"requests"', b'"\\u0072equests"')):
        lines = taken(content, size)
        assert [line["custom_id"] for line in lines] == ["r0", "r1"]
        assert [line["body"] for line in lines] == [request["params"] for request in wanted]


GOOD = orjson.dumps(one())


@pytest.mark.parametrize("size", [1, 2, 10_000])
@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"nul", b"1", b'"x"', b"\xff", b"\xef\xbb\xbf{}", b"[" + GOOD + b"]",
        b'{"requests":[' + GOOD, b'{"requests":[' + GOOD + b"]", b'{"requests":[' + GOOD + b",]}",
        b'{"requests":[,' + GOOD + b"]}", b'{"requests":[' + GOOD + b" " + GOOD + b"]}",
        b'{"requests":[' + GOOD + b"],}", b'{"requests":[' + GOOD + b"]}}",
        b'{"requests":[' + GOOD + b"]}x", b'{"requests" [' + GOOD + b"]}",
        b"{requests:[" + GOOD + b"]}", b'{"requests":[' + GOOD + b"}}",
        b'{"requests":[' + GOOD[:-1] + b"]]}", b'{"requests":[' + GOOD + b'],"a":}',
        b'{"requests":[' + GOOD + b'],"a":tru}', b'{"requests":[' + GOOD + b'],"a":[1 2]}',
        b'{"requests":[' + GOOD + b'],"a":01}', b'{"requests":[' + GOOD + b'],"a":NaN}',
        b'{"requests":[' + GOOD + b'],"a":"\\x"}', b'{"requests":[' + GOOD + b'],"a":"\xff"}',
        b'{"requests":[' + GOOD + b'],"a":"\n"}', b'{"requests":[' + GOOD + b'],"\\ud800":1}',
        b'{"requests":[' + GOOD + b'],"a":[1\\]}', b'{"requests":[tru]}', b'{"requests":[""]}',
        b'{"requests":"' + GOOD + b'"}', b'{"requests":{"a":' + GOOD + b"}}",
    ],
)  # fmt: skip
def test_what_is_no_json_or_no_list_of_requests_is_refused(body: bytes, size: int) -> None:
    assert refusal(body, size)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
)


@examples(300)
@given(
    value=VALUES, cut=st.integers(0, 200), drop=st.integers(0, 2), put=st.binary(max_size=2),
    size=st.integers(1, 9),
)  # fmt: skip
def test_what_is_accepted_is_what_json_says(
    value: Any, cut: int, drop: int, put: bytes, size: int
) -> None:
    body = orjson.dumps({"x": value, "requests": [one(0, top_k=value)], "y": [value]})
    body = body[:cut] + put + body[cut + drop :]
    try:
        wanted = orjson.loads(body)
    except orjson.JSONDecodeError:
        refusal(body, size)
        return
    try:
        lines = taken(body, size)
    except ApiError:
        return
    assert [line["body"] for line in lines] == [r["params"] for r in wanted["requests"]]
