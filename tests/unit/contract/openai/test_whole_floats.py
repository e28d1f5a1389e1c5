"""A whole float (16.0) is a whole number wherever a request may have one: pandas writes it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from msgspec import Struct

from contract.errors import RequestRejected
from contract.openai.body import CHAT_URL, COMPLETION_URL, MESSAGES_URL
from contract.openai.lines import check_body, parse_line
from gateway.batches.anthropic.create_body import RequestLines
from gateway.batches.api.protocol import BatchCreate
from gateway.http.errors import ApiError
from gateway.http.json_api import read
from gateway.online.request import read as read_online

MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 1.0, "maxLength": 16.0},
        "b": {"type": "array", "items": {"type": "number", "enum": [1.0, 2.5]}, "maxItems": 3.0},
    },
    "maxProperties": 2.0,
}
WHOLE = orjson.dumps(SCHEMA).replace(b"16.0", b"16").replace(b'":3.0', b'":3')
WHOLE = WHOLE.replace(b'":1.0', b'":1').replace(b'":2.0', b'":2')
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CONSTRAINTS: list[tuple[str, str, Any]] = [
    (CHAT_URL, "response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    (CHAT_URL, "structured_outputs", {"json": SCHEMA}),
    (COMPLETION_URL, "structured_outputs", {"json": SCHEMA}),
    (CHAT_URL, "tools", [TOOL, TOOL]),
    ("/v1/responses", "text", {"format": {"type": "json_schema", "schema": SCHEMA}}),
    (MESSAGES_URL, "tools", [{"name": "f", "input_schema": SCHEMA}]),
]


def body_of(url: str, **more: Any) -> dict[str, Any]:
    asked = {"input": "x"} if url == "/v1/responses" else {"messages": MESSAGES}
    asked = {"prompt": "x"} if url == COMPLETION_URL else asked
    return asked | ({"max_tokens": 16.0} if url == MESSAGES_URL else {}) | more


@pytest.mark.parametrize(("url", "field", "value"), CONSTRAINTS)
def test_bounds_of_schemas_are_whole_numbers(url: str, field: str, value: Any) -> None:
    """xgrammar: "maxLength must be an integer"; the numbers of an enum stay as they are."""
    body = body_of(url, **{field: value})
    line = orjson.dumps({"custom_id": "a", "url": url, "body": body})
    queued = orjson.loads(parse_line(line).body)
    online = orjson.loads(read_online(url, orjson.dumps(body), 0).body)
    for found in (queued, check_body(url, body), online):
        assert WHOLE in orjson.dumps(found[field])


class Written(bytearray):
    """Keeps what is written."""

    write = bytearray.extend


def test_a_message_batch_takes_them() -> None:
    written: Any = Written()
    requests = RequestLines(written, 10**6)
    params = {"model": "m", "max_tokens": 16.0, "messages": MESSAGES, "top_k": 5.0}
    requests.feed(orjson.dumps({"requests": [{"custom_id": "a", "params": params}]}))
    requests.end()
    queued = orjson.loads(parse_line(bytes(written).strip()).body)
    assert (str(queued["max_tokens"]), str(queued["top_k"])) == ("16", "5")


@pytest.mark.parametrize("tokens", [16.5, 0.0, -1.0, True, "16", 1e400, None])
def test_a_message_batch_refuses_others(tokens: Any) -> None:
    requests = RequestLines(Written(), 10**6)  # type: ignore[arg-type]
    params = {"model": "m", "max_tokens": tokens, "messages": MESSAGES}
    with pytest.raises(ApiError, match="max_tokens: give a whole number"):
        requests.feed(orjson.dumps({"requests": [{"custom_id": "a", "params": params}]}))


def test_a_batch_takes_them() -> None:
    asked = {
        "input_file_id": "f", "endpoint": CHAT_URL, "completion_window": "24h", "priority": 6.0,
        "output_expires_after": {"anchor": "created_at", "seconds": 3600.0},
    }  # fmt: skip
    found = read(orjson.dumps(asked), BatchCreate)
    kept = found.output_expires_after
    assert kept is not None
    assert (str(found.priority), str(kept.seconds)) == ("6", "3600")
    for field, value in (("priority", 6.5), ("output_expires_after", {"seconds": 3600.5})):
        with pytest.raises(ApiError) as raised:
            read(orjson.dumps(asked | {field: value}), BatchCreate)
        assert (raised.value.param or "").startswith(field)


class Numbers(Struct):
    """Whole numbers in lists and objects."""

    of: list[int] = []
    by: dict[str, int] = {}


def test_a_body_has_them_at_any_depth() -> None:
    found = read(b'{"of": [1.0, 2], "by": {"a": 3.0, "b": 4.0}}', Numbers)
    assert repr(found) == repr(Numbers([1, 2], {"a": 3, "b": 4}))
    large = b'{"of": [1.0], "by": {}, "other": [1180591620717411303424, 1.5]}'
    assert repr(read(large, Numbers)) == repr(Numbers([1], {}))
    with pytest.raises(ApiError, match="float"):
        read(b'{"of": [1.0, 2.5]}', Numbers)


def test_the_priority_of_an_online_request_is_the_queues() -> None:
    asked = read_online(CHAT_URL, orjson.dumps({"messages": MESSAGES, "priority": 6.0}), 0)
    assert asked.priority == 6
    assert b"priority" not in asked.body


@pytest.mark.parametrize("number", ["1180591620717411303424", "1e25", "-1180591620717411303424"])
@pytest.mark.parametrize("field", ["seed", "max_tokens", "top_k", "n", "min_tokens"])
def test_a_number_that_is_too_large_is_told_so(field: str, number: str) -> None:
    with pytest.raises(RequestRejected) as raised:
        parse_line(b'{"prompt": "x", "%s": %s}' % (field.encode(), number.encode()))
    assert "fraction" not in raised.value.message
    assert "is above" in raised.value.message or "is below" in raised.value.message
