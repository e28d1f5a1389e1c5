"""The envelope: what MessageWriter writes, read_delivery and read_body read; hostile headers."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.protocol.lessee import celery_message, chat

from contract.errors import RequestRejected
from contract.message import MessageWriter, read_body, read_delivery, write_online
from contract.openai.body import CHAT_URL

text = st.text(st.characters(codec="utf-8"), max_size=30)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(body=st.dictionaries(text, json_values, max_size=4), custom_id=text | st.none(),
       line=st.integers(1, 2**40), deadline=st.none() | st.floats(0, 4e9))  # fmt: skip
def test_what_is_written_is_read(
    body: dict[str, Any], custom_id: str | None, line: int, deadline: float | None
) -> None:
    write = MessageWriter("b1", 1234567890123, "life", "warmq.größe", 9, deadline)
    raw = write.write("id-1", custom_id, line, CHAT_URL, orjson.dumps(body))
    delivery = read_delivery("w/7", raw, returns=2, deaths=1)
    assert read_body(delivery) == body
    assert (delivery.request_id, delivery.batch, delivery.created) == (
        "id-1", "b1", "1234567890123",
    )  # fmt: skip
    assert (delivery.custom_id, delivery.line, delivery.url) == (custom_id, line, CHAT_URL)
    assert delivery.deadline == deadline
    assert (delivery.lease, delivery.attempt, delivery.deaths) == ("w/7", 3, 1)
    assert not delivery.ignore_result


def test_the_envelope_is_celerys_protocol_2() -> None:
    raw = MessageWriter("b1", 5, "life", "warmq", 6).write("id-1", "c", 1, CHAT_URL, b"{}")
    message = orjson.loads(raw)
    assert message["content-type"] == "application/json"
    assert message["headers"]["task"] == "warmq.generate"
    assert message["headers"]["id"] == message["headers"]["root_id"] == "id-1"
    assert message["properties"]["correlation_id"] == "id-1"
    assert message["properties"]["priority"] == 6
    assert message["properties"]["delivery_info"] == {"exchange": "", "routing_key": "warmq"}
    args, kwargs, embed = orjson.loads(message["body"])
    assert (args, kwargs) == ([{}], {})
    assert embed == {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


def test_only_a_message_of_many_sequences_says_how_many() -> None:
    write = MessageWriter("b1", 5, "life", "warmq", 6).write
    one, many = (write("id-1", "c", 1, CHAT_URL, b"{}", count) for count in (1, 3))
    assert one == write("id-1", "c", 1, CHAT_URL, b"{}")
    assert "sequences" not in orjson.loads(one)["headers"]["warmq"]
    assert orjson.loads(many)["headers"]["warmq"]["sequences"] == 3
    assert many.replace(b'"sequences":3,', b"") == one
    given: dict[str, Any] = {"queue": "warmq", "priority": 0, "tenant": "t", "deadline": 1,
                             "keep_ms": 1}  # fmt: skip
    assert b"sequences" not in write_online("id-1", CHAT_URL, b"{}", **given)
    assert b'"sequences":3' in write_online("id-1", CHAT_URL, b"{}", **given, sequences=3)


@pytest.mark.parametrize(
    ("priority", "step"),
    [
        (0, 0), (2, 0), (3, 3), (5, 3), (6, 6), (9, 9), (12, 9), (-1, 0), (6.5, 6), (True, 0),
        (None, 0), ("6", 0), ([6], 0), (1e300, 9),
    ],
)  # fmt: skip
def test_a_priority_is_read_as_the_step_of_its_list(priority: object, step: int) -> None:
    message = orjson.loads(celery_message("t0"))
    message["properties"]["priority"] = priority
    assert read_delivery("w/1", orjson.dumps(message)).priority == step


@pytest.mark.parametrize("properties", [{}, [], None, "6"])
def test_a_message_without_a_priority_has_the_highest(properties: object) -> None:
    message = orjson.loads(celery_message("t0")) | {"properties": properties}
    assert read_delivery("w/1", orjson.dumps(message)).priority == 0


@pytest.mark.parametrize("encoding", ["base64", "BASE64", "utf-8", "UTF-8", None])
def test_bodies_in_either_encoding_are_read(encoding: str | None) -> None:
    message = orjson.loads(celery_message("t0", chat("größer")))
    message["properties"]["body_encoding"] = encoding
    if encoding and encoding.lower() == "base64":
        message["body"] = base64.b64encode(message["body"].encode()).decode()
    assert read_body(read_delivery("w/1", orjson.dumps(message))) == chat("größer")


HOSTILE: dict[str, dict[str, Any]] = {
    "warmq is a list": {"warmq": [1, 2]},
    "warmq is text": {"warmq": "batch"},
    "batch is a number": {"warmq": {"batch": 5, "created": []}},
    "line is text": {"warmq": {"line": "7"}},
    "custom_id is an object": {"warmq": {"custom_id": {}}},
    "url is a number": {"warmq": {"url": 7}},
    "deadline is text": {"warmq": {"deadline": "soon"}},
    "deadline is huge": {"warmq": {"deadline": 1e308}},
    "expires is no date": {"expires": "tomorrow"},
    "expires is an object": {"expires": {}},
    "task is missing": {"task": None},
    "ignore_result is text": {"ignore_result": "yes"},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers_are_read_or_refused_but_never_fail(what: str) -> None:
    raw = celery_message("t0", **HOSTILE[what])
    try:
        delivery = read_delivery("w/1", raw)
        read_body(delivery)
    except RequestRejected as error:
        assert error.message
        return
    assert delivery.request_id == "t0"
    assert delivery.batch == ""
    assert delivery.line is None
    assert delivery.custom_id is None
    assert not delivery.ignore_result


@pytest.mark.parametrize(
    ("ours", "expires", "deadline"),
    [
        (100.0, None, 100.0),
        (None, "1970-01-01T00:01:40", 100.0),
        (None, "1970-01-01T01:01:40+01:00", 100.0),
        (None, 100, 100.0),
        (50, "1970-01-01T00:01:40+00:00", 50.0),
        (200, "1970-01-01T00:01:40+00:00", 100.0),
        (None, None, None),
    ],
)
def test_the_earlier_of_deadline_and_expires_counts(
    ours: float | None, expires: Any, deadline: float | None
) -> None:
    raw = celery_message("t0", expires=expires, warmq={"deadline": ours})
    assert read_delivery("w/1", raw).deadline == deadline
