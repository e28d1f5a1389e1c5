"""Fields that were renamed, or that other servers have, are refused with today's name and form."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from contract.errors import RequestRejected
from contract.openai.body import (
    BODY_TYPES,
    CHAT_URL,
    COMPLETION_URL,
    MESSAGES_URL,
    min_body,
)
from contract.openai.fields import known_names
from contract.openai.former_names import FORMER
from contract.openai.lines import check_body, parse_line

GUIDED = {
    "guided_choice": {"choice": ["good", "bad"]},
    "guided_json": {"json": {"type": "object"}},
    "guided_regex": {"regex": "[0-9]+"},
    "guided_grammar": {"grammar": 'root ::= "yes" | "no"'},
    "guided_json_object": {"json_object": True},
}


@pytest.mark.parametrize("name", [*GUIDED, "guided_whitespace_pattern", "guided_decoding"])
@pytest.mark.parametrize("url", [CHAT_URL, COMPLETION_URL])
def test_a_guided_field_is_refused_with_the_field_of_today(name: str, url: str) -> None:
    body = min_body(url) | {name: ["good", "bad"]}
    line = orjson.dumps({"custom_id": "a", "url": url, "body": body})
    with pytest.raises(RequestRejected) as raised:
        parse_line(line)
    assert (raised.value.code, raised.value.field) == ("unknown_field", f"body.{name}")
    assert "structured_outputs" in raised.value.message


@pytest.mark.parametrize(("name", "value"), GUIDED.items())
def test_the_form_in_the_error_is_accepted(name: str, value: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected) as raised:
        check_body(CHAT_URL, min_body(CHAT_URL) | {name: 7})
    assert json.dumps(value) in raised.value.message
    check_body(CHAT_URL, min_body(CHAT_URL) | {"structured_outputs": value})


@pytest.mark.parametrize(
    ("name", "value", "form"),
    [
        ("guided_choice", ["gut", "schlecht"], {"choice": ["gut", "schlecht"]}),
        ("guided_choice", "gut, schlecht", {"choice": ["gut", "schlecht"]}),
        ("guided_json", {"type": "array"}, {"json": {"type": "array"}}),
        ("guided_regex", "a+", {"regex": "a+"}),
        ("guided_choice", ["x" * 1000], GUIDED["guided_choice"]),
        ("guided_regex", "\u202e", GUIDED["guided_regex"]),
    ],
)
def test_the_error_has_the_values_of_the_request(name: str, value: object, form: object) -> None:
    with pytest.raises(RequestRejected) as raised:
        check_body(CHAT_URL, min_body(CHAT_URL) | {name: value})
    assert raised.value.message.endswith(json.dumps(form))
    assert "renamed in vLLM" in raised.value.message


def test_the_place_of_the_engines_backend_and_of_extra_body_is_named() -> None:
    for name, words in (
        ("guided_decoding_backend", "--structured-outputs-config"),
        ("extra_body", "body itself"),
    ):
        with pytest.raises(RequestRejected, match=words):
            check_body(CHAT_URL, min_body(CHAT_URL) | {name: {}})


def test_messages_name_the_field_that_anthropic_has() -> None:
    for name in ("structured_outputs", "guided_choice", "response_format"):
        with pytest.raises(RequestRejected, match="output_config") as raised:
            check_body(MESSAGES_URL, min_body(MESSAGES_URL) | {name: {"choice": ["a"]}})
        assert raised.value.code == "unknown_field"


def test_no_former_name_is_a_field_of_today() -> None:
    assert all(FORMER.isdisjoint(known_names(url)) for url in BODY_TYPES)
