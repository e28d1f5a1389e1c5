"""Constraints and lists that no engine should be given are refused by name; honest ones are not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from contract.errors import RequestRejected
from contract.openai.body import CHAT_URL, COMPLETION_URL, MESSAGES_URL, RESPONSES_URL, min_body
from contract.openai.lines import check_body, parse_line
from contract.openai.structured import (
    MAX_ALL_REPETITIONS,
    MAX_BRANCHES,
    MAX_PROPERTIES,
    MAX_REPETITIONS,
    MAX_VALUES,
    repetitions,
)
from gateway.online.endpoint import reported_tokens

TEXT = {"type": "string"}


def schema(given: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}
    }


def structured(**given: Any) -> dict[str, Any]:
    return {"structured_outputs": given}


def fields(number: int, each: Any = None) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": each or TEXT for n in range(number)}}


def tree(depth: int) -> dict[str, Any]:
    if not depth:
        return TEXT
    return {"type": "object", "properties": {"l": tree(depth - 1), "r": tree(depth - 1)}}


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = TEXT
    for _ in range(levels):
        found = {"type": "array", "items": found}
    return found


def pattern(text: str) -> dict[str, Any]:
    return schema(TEXT | {"pattern": text})


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


values = [f"value {n}" for n in range(100_000)]
BOMB = TEXT | {"pattern": "^[a-z]{0,50000}$"}
#: By name: url, fields, what the error says.
HOSTILE: dict[str, tuple[str, dict[str, Any], str]] = {
    "F1": (CHAT_URL, schema(BOMB), "repetitions come to 50000; give at most 1000"),
    "3,000": (CHAT_URL, pattern("^[a-z]{0,3000}$"), "give at most 1000"),
    "least": (CHAT_URL, pattern("^[a-z]{3000,}$"), "give at most 1000"),
    "exactly": (CHAT_URL, pattern("^(ab){3000}$"), "give at most 1000"),
    "nested": (CHAT_URL, pattern("^((a{0,100})b){0,100}$"), "come to 10000"),
    "doubled": (CHAT_URL, pattern("a{100}{100}"), "come to 10000"),
    "in a class": (CHAT_URL, pattern(r"[\](]{2000}"), "come to 2000"),
    "side by side": (CHAT_URL, pattern("a{0,30}" * 40), "come to 1200"),
    "many patterns": (
        CHAT_URL, schema(fields(20, TEXT | {"pattern": "a{0,999}"})), "19980 repetitions in its"),
    "pattern of names": (
        CHAT_URL, schema({"patternProperties": {"^a{0,3000}": TEXT}}), "give at most 1000"),
    "enum": (CHAT_URL, schema({"enum": values}), "give at most 131072"),
    "short enum": (CHAT_URL, schema({"enum": [*range(10_000)]}), "at most 2000"),
    "many enums": (CHAT_URL, schema(fields(500, {"enum": [*range(9)]})), "4500 values"),
    "choice": (COMPLETION_URL, structured(choice=values), "give at most 131072"),
    "short choice": (COMPLETION_URL, structured(choice=["a"] * 9000), "9000 values"),
    "properties": (CHAT_URL, schema(fields(5000)), "give at most"),
    "few properties often": (CHAT_URL, schema({"anyOf": [fields(100)] * 20}), "2000 properties"),
    "tree": (CHAT_URL, schema(tree(11)), "properties altogether; give at most 1000"),
    "definitions": (
        CHAT_URL, schema({"$defs": {str(n): fields(20) for n in range(100)}}), "2000 properties"),
    "alternatives": (CHAT_URL, schema({"anyOf": [TEXT] * 600}), "600 subschemas"),
    "depth": (CHAT_URL, schema(deep(120)), "give at most 100 levels"),
    "regex": (COMPLETION_URL, structured(regex="a{0,50000}"), "give at most 1000"),
    "long regex": (COMPLETION_URL, structured(regex="a" * 200_000), "200012 bytes"),
    "grammar": (COMPLETION_URL, structured(grammar='root ::= "a"{0,50000}'), "give at most 10000"),
    "long grammar": (COMPLETION_URL, structured(grammar='root ::= "a"\n' * 99_000), "bytes as"),
    "schema as a text": (
        COMPLETION_URL, structured(json=orjson.dumps(BOMB).decode()), "give at most 1000"),
    "structural tag": (
        COMPLETION_URL,
        structured(structural_tag=orjson.dumps(
            {"structures": [{"begin": "<a>", "schema": BOMB, "end": "</a>"}]}).decode()),
        "give at most 1000"),
    "a tag's format": (
        CHAT_URL,
        {"response_format": {"type": "structural_tag", "format": {"type": "json_schema",
                                                                  "json_schema": BOMB}}},
        "give at most 1000"),
    "a tool": (CHAT_URL, {"tools": [tool(BOMB)]}, "field body.tools: has a pattern"),
    "many tools": (CHAT_URL, {"tools": [tool(fields(900))] * 40}, "give at most 524288"),
    "a response": (
        RESPONSES_URL, {"text": {"format": {"type": "json_schema", "name": "x", "schema": BOMB}}},
        "field body.text: has a pattern"),
    "a response's tool": (
        RESPONSES_URL, {"tools": [{"type": "function", "name": "f", "parameters": BOMB}]}, "tools"),
    "a message's tool": (MESSAGES_URL, {"tools": [{"name": "f", "input_schema": BOMB}]}, "tools"),
    "a message's format": (
        MESSAGES_URL, {"output_config": {"format": {"type": "json_schema", "schema": BOMB}}},
        "field body.output_config: has a pattern"),
    "biased": (
        CHAT_URL, {"logit_bias": {str(n): 1 for n in range(5000)}}, "give at most 4096 entries"),
    "biased response": (
        RESPONSES_URL, {"logit_bias": {str(n): 1 for n in range(5000)}}, "at most 4096 entries"),
    "stops": (CHAT_URL, {"stop": values}, "body.stop: has a length that is above 128"),
    "a long stop": (CHAT_URL, {"stop": "x" * 5000}, "body.stop: has a length that is above 1024"),
    "a long stop of many": (CHAT_URL, {"stop": ["x" * 5000]}, "above 1024"),
    "stop sequences": (MESSAGES_URL, {"stop_sequences": values}, "above 128"),
    "stop tokens": (COMPLETION_URL, {"stop_token_ids": [1] * 5000}, "above 1024"),
    "bad words": (COMPLETION_URL, {"bad_words": values[:50_000]}, "above 1024"),
    "allowed tokens": (COMPLETION_URL, {"allowed_token_ids": [1] * 400_000}, "above 65536"),
}  # fmt: skip
HONEST: dict[str, tuple[str, dict[str, Any]]] = {
    "properties": (CHAT_URL, schema(fields(MAX_PROPERTIES))),
    "values": (CHAT_URL, schema({"enum": [*range(MAX_VALUES)]})),
    "choices": (COMPLETION_URL, structured(choice=[str(n) for n in range(MAX_VALUES)])),
    "branches": (CHAT_URL, schema({"anyOf": [TEXT] * MAX_BRANCHES})),
    "a pattern": (CHAT_URL, pattern(f"^[a-z]{{0,{MAX_REPETITIONS}}}$")),
    "patterns": (
        CHAT_URL,
        schema(fields(MAX_ALL_REPETITIONS // 100, TEXT | {"pattern": "^[a-z]{0,100}$"}))),
    "a uuid": (CHAT_URL, pattern(r"^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$")),
    "a brace": (CHAT_URL, pattern(r"^\{9999\}[{5000}]{,2}{x}$")),
    "lengths": (CHAT_URL, schema(TEXT | {"maxLength": 1_000_000})),
    "a list": (CHAT_URL, schema({"type": "array", "items": TEXT, "maxItems": 100_000})),
    "recursion": (CHAT_URL, schema({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}})),
    "a property of such a name": (
        CHAT_URL, schema({"properties": {"pattern": TEXT, "enum": TEXT, "properties": TEXT}})),
    "many tools": (CHAT_URL, {"tools": [tool(fields(20))] * 128}),
    "no JSON": (COMPLETION_URL, structured(json="{")),
    "null": (CHAT_URL, {"response_format": None, "tools": None, "structured_outputs": None}),
    "any object": (CHAT_URL, {"response_format": {"type": "json_object"}}),
    "stops": (CHAT_URL, {"stop": ["x" * 1024] * 128}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_engine_should_be_given_is_refused_by_its_limit(name: str) -> None:
    url, given, words = HOSTILE[name]
    body = min_body(url) | given
    with pytest.raises(RequestRejected) as caught:
        check_body(url, body)
    assert words in caught.value.message
    assert f"body.{next(iter(given))}" in str(caught.value.field)
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    with pytest.raises(RequestRejected) as of_line:
        parse_line(orjson.dumps(line))
    assert of_line.value.message == caught.value.message


@pytest.mark.parametrize("name", HONEST)
def test_what_is_at_a_limit_is_taken(name: str) -> None:
    url, given = HONEST[name]
    body = min_body(url) | given
    assert check_body(url, body) == body
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    assert parse_line(orjson.dumps(line)).url == url


@pytest.mark.parametrize(
    ("pattern", "number"),
    [("a{3}", 3), ("(a{3}b{2}){4}", 20), ("(a|b){2,5}", 5), (r"\({3}", 3), ("((((a", 0),
     ("))){7}", 7), ("[(]{2}(x{3})", 5), ("a{1000000000000}", 10**12), ("[" * 9 + "{9}", 0)],
)  # fmt: skip
def test_repetitions_are_counted_as_often_as_their_group(pattern: str, number: int) -> None:
    assert repetitions(pattern) == number


def test_tokens_that_were_counted_are_charged() -> None:
    assert reported_tokens(b'{"count":7,"max_model_len":9,"tokens":[1]}') == 7
    assert reported_tokens(b'{"input_tokens":5}') == 5
    assert reported_tokens(b'{"usage":{"total_tokens":3},"count":9}') == 3
