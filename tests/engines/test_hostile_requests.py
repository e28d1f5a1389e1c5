"""What one client sends to a real engine does not stop the others, and is refused as its mistake.

The bodies go past the contract's bounds (tests/unit/test_structured_bounds.py), as from an older
producer: the engine bounds their time itself.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hostile_requests import Line, ended, small

from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.openai.messages import COUNT_TOKENS_URL
from contract.openai.responses import TOKENIZE_URL
from demo.stack import MODEL

pytestmark = pytest.mark.timeout(300)
TEXT = {"type": "string"}


def schema(given: Any) -> Line:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}
    return CHAT_URL, small(0)[1] | {"response_format": wanted}


def structured(**given: Any) -> Line:
    return COMPLETION_URL, {"prompt": "a", "max_tokens": 8, "structured_outputs": given}


def fields(number: int, each: Any = None) -> dict[str, Any]:
    names = [f"p{n}" for n in range(number)]
    return {"type": "object", "properties": dict.fromkeys(names, each or TEXT), "required": names}


def optional(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": TEXT for n in range(number)}}


def tree(depth: int) -> dict[str, Any]:
    return fields(2, tree(depth - 1)) if depth else TEXT


def picture(url: str) -> Line:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return CHAT_URL, {"messages": [{"role": "user", "content": content}], "max_tokens": 4}


values = [f"value {n}" for n in range(100_000)]
CALLED = {"type": "function", "function": {"name": "f", "parameters": optional(5000)}}
LONG = {"messages": [{"role": "user", "content": "word " * 1_600_000}]}
#: By name: url and body, and what the error says.
HOSTILE: dict[str, tuple[Line, str]] = {
    "F1": (schema(TEXT | {"pattern": "^[a-z]{0,50000}$"}), "more than 2 s to compile"),
    "F1 again": (schema(TEXT | {"pattern": "^[a-z]{0,50000}$"}), "more than 2 s to compile"),
    "3,000": (schema(TEXT | {"pattern": "^[a-z]{0,3000}$"}), "is refused: Check failed"),
    "enum": (schema({"enum": values}), "more than 2 s"),
    "choice": (structured(choice=values), "more than 2 s"),
    "properties": (schema(optional(5000)), "more than 2 s"),
    "tree": (schema(tree(14)), "more than 2 s"),
    "options": (structured(regex="a?" * 2000 + "a" * 2000), "more than 2 s"),
    "lengths": (
        schema(fields(200, None) | {"properties": {
            f"p{n}": TEXT | {"maxLength": 1000 + n} for n in range(200)}}), "more than 2 s"),
    "nothing": (schema({"$ref": "#"}), "allows no text at all"),
    "false": (schema(fields(1) | {"properties": {"p0": False}}), "cannot accept any value"),
    "an open group": (structured(regex="(a"), "unclosed group"),
    "look ahead": (structured(regex="(?=a)b"), "look-around"),
    "no such rule": (structured(grammar="root ::= missing"), "is refused"),
    "tokens": (
        (TOKENIZE_URL, {"prompt": "word " * 3_000_000}), "15000000 characters; give at most 131072"),
    "tokens of a chat": ((TOKENIZE_URL, LONG), "give at most 131072"),
    "tokens of a message": ((COUNT_TOKENS_URL, LONG), "give at most 131072"),
    "a cut prompt": (
        (COMPLETION_URL, {"prompt": "word " * 1_600_000, "truncate_prompt_tokens": 10}), "at most"),
    "a cut chat": ((CHAT_URL, LONG | {"truncate_prompt_tokens": 10}), "give at most 131072"),
    "a file": (picture("file:///etc/hostname"), "tiny is not a multimodal model"),
    "a picture": (picture("data:image/png;base64,AAAA"), "tiny is not a multimodal model"),
}  # fmt: skip
HONEST: dict[str, Line] = {
    "fifty fields": schema(fields(50)),
    "fifty optional fields": schema(optional(50)),
    "five hundred values": schema({"enum": values[:500]}),
    "a choice": structured(choice=["yes", "no"]),
    "a pattern": schema(TEXT | {"pattern": "^[a-z]{1,20}$"}),
    "definitions": schema({
        "$defs": {"node": {"type": "object", "properties": {
            "name": TEXT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["name"]}},
        "type": "object", "properties": {"first": {"$ref": "#/$defs/node"}}, "required": ["first"],
    }),
    "long texts": schema(fields(3, TEXT | {"maxLength": 100_000})),
    "multiples": schema({"type": "integer", "multipleOf": 3}),
    "any object": (CHAT_URL, small(0)[1] | {"response_format": {"type": "json_object"}}),
    "a regex": structured(regex=r"\d{3}-\d{4}"),
    "tokens": (TOKENIZE_URL, {"prompt": "word " * 20_000}),
    "a cut prompt": (
        COMPLETION_URL,
        {"prompt": "word " * 20_000, "truncate_prompt_tokens": 10, "max_tokens": 4}),
}  # fmt: skip


@cache
def everything(folder: Path) -> dict[str, Any]:
    lines = {f"hostile {name}": line for name, (line, _) in HOSTILE.items()}
    return ended(folder, lines | {f"honest {name}": line for name, line in HONEST.items()})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return everything(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_as_a_mistake_while_others_are_answered(
    name: str, report: dict[str, Any]
) -> None:
    found = report[f"hostile {name}"]
    assert found["kind"] == "RequestRejected", found
    assert HOSTILE[name][1] in found["message"]
    assert str(MODEL) not in found["message"]
    assert "/models/" not in found["message"]
    assert found["took_s"] < 8, found
    assert found["pause_s"] < 1.5, found
    assert found["other"]["kind"] == "answer"
    assert found["other"]["took_s"] < 4, found


@pytest.mark.parametrize("name", HONEST)
def test_honest_constraints_and_texts_are_served(name: str, report: dict[str, Any]) -> None:
    found = report[f"honest {name}"]
    assert found["kind"] == "answer", found
    assert found["other"]["kind"] == "answer"


def test_what_was_refused_for_its_time_is_not_computed_again(report: dict[str, Any]) -> None:
    assert report["hostile F1 again"]["took_s"] < 1
