"""Options for structured answers set one field of all lines; wrong ones name the option."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
import pydantic
import pytest

from contract.errors import RequestRejected
from contract.openai.body import BODY_TYPES, CHAT_URL, COMPLETION_URL, RESPONSES_URL, min_body
from contract.openai.lines import parse_line
from contract.openai.structured import answer_schema
from contract.settings import Settings
from producer.cli.options import fields_of_all_lines
from producer.client.client import submission_of
from producer.input.options import BadOption
from producer.input.structured import with_structure
from producer.submit.submission import Submission

SCHEMA = {"type": "object", "properties": {"stars": {"type": "integer"}}, "required": ["stars"]}


class Label(StrEnum):
    GOOD = "good"
    BAD = "bad"


class Rating(pydantic.BaseModel):
    stars: int


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("good,bad", ["good", "bad"]),
        (" good , bad ", ["good", "bad"]),
        ("1,2,3", ["1", "2", "3"]),
        ('["yes, sure", "no"]', ["yes, sure", "no"]),
        ("[a],[b]", ["[a]", "[b]"]),
        ("좋음,나쁨", ["좋음", "나쁨"]),
        (["yes, sure", "no"], ["yes, sure", "no"]),
        (Label, ["good", "bad"]),
    ],
)
def test_choices_are_the_allowed_texts(given: Any, texts: list[str]) -> None:
    found = with_structure({"max_tokens": 4}, given, None)
    assert found == {"max_tokens": 4, "structured_outputs": {"choice": texts}}
    assert json.loads(orjson.dumps(found)) == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("good,", "is empty"),
        ("", "is empty"),
        ([], "no answer"),
        ("good,good", "'good' is given twice"),
        ("[1, 2]", "1 is not a text"),
        (["good", 2], "2 is not a text"),
        ([f"label {n}" for n in range(3000)], "values in its enums and choices"),
    ],
)
def test_a_wrong_choice_is_named(given: Any, words: str) -> None:
    with pytest.raises(BadOption, match=f"^choice: .*{words}"):
        with_structure({}, given, None)


def test_a_schema_is_an_object_a_file_or_a_model_of_pydantic(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_bytes(b"\xef\xbb\xbf" + orjson.dumps(SCHEMA, option=orjson.OPT_INDENT_2))
    for given in (SCHEMA, str(path), path):
        assert with_structure({}, None, given) == {"structured_outputs": {"json": SCHEMA}}
    found = with_structure({}, None, Rating)["structured_outputs"]["json"]
    assert found["properties"]["stars"]["type"] == "integer"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b'{"type": "object",\n\n ]', "line 3, character 2: not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b'"object"', "is not a JSON object"),
        (orjson.dumps({"name": "x", "schema": SCHEMA}), "inside its field 'schema'"),
        (
            orjson.dumps({"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
            "inside its field 'json_schema'",
        ),
        (json.dumps(SCHEMA).encode("utf-16"), "iconv -f UTF-16"),
        (orjson.dumps({"enum": [str(n) for n in range(3000)]}), "values in its enums"),
    ],
)
def test_a_wrong_schema_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "schema.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadOption) as raised:
        fields_of_all_lines((), None, str(path), "")
    assert raised.value.message.startswith("--schema")
    assert words in raised.value.message


def test_a_property_of_the_name_schema_is_no_wrapper() -> None:
    schema = {"type": "object", "properties": {"schema": {"type": "string"}}}
    assert with_structure({}, None, schema)["structured_outputs"]["json"] == schema


@pytest.mark.parametrize(
    "pair",
    ['structured_outputs={"choice": ["a"]}', 'response_format={"type": "json_object"}'],
)
def test_a_second_form_for_all_lines_is_refused(pair: str) -> None:
    with pytest.raises(BadOption, match="leave one out"):
        fields_of_all_lines((pair,), "good,bad", None, "")
    with pytest.raises(BadOption, match="--choice and --schema exclude each other"):
        fields_of_all_lines((), "good,bad", "schema.json", "")


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETION_URL])
def test_a_line_with_another_form_is_refused_and_not_changed(url: str) -> None:
    choice = {"structured_outputs": {"choice": ["good", "bad"]}}
    form = {"response_format": {"type": "json_object"}}
    for given, own in ((choice, form), (form, choice)):
        line = {"custom_id": "a", "url": url, "body": min_body(url) | own}
        with pytest.raises(RequestRejected, match="leave one out") as raised:
            parse_line(orjson.dumps(line), given)
        assert raised.value.field == f"body.{next(iter(own))}"
    for harmless in ({"response_format": {"type": "text"}}, {"response_format": None}):
        line = {"custom_id": "a", "url": url, "body": min_body(url) | harmless}
        body = orjson.loads(parse_line(orjson.dumps(line), choice).body)
        assert body["structured_outputs"] == {"choice": ["good", "bad"]}


def test_the_field_is_set_in_each_line_that_generates() -> None:
    fields = with_structure({}, None, SCHEMA)
    for url in (CHAT_URL, COMPLETION_URL, RESPONSES_URL):
        line = {"custom_id": "a", "url": url, "body": min_body(url)}
        body = orjson.loads(parse_line(orjson.dumps(line), fields).body)
        assert body["structured_outputs"] == {"json": SCHEMA}
    assert "structured_outputs" not in BODY_TYPES["/v1/embeddings"].__struct_fields__


def test_a_client_sets_the_same_fields_as_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_bytes(orjson.dumps(SCHEMA))
    for options, cli in (
        ({"choice": ["good", "bad"]}, ("good,bad", None)),
        ({"schema": SCHEMA}, (None, str(path))),
    ):
        submission = submission_of({"fields": {"max_tokens": 4}} | options, Settings())
        assert submission.overrides == fields_of_all_lines(("max_tokens=4",), *cli, "")
    with pytest.raises(BadOption, match=r"^choice: "):
        submission_of({"choice": ["a"], "fields": {"response_format": {}}}, Settings())


def test_the_schema_of_a_batch_is_found_in_its_options() -> None:
    overrides = with_structure({}, None, SCHEMA)
    options = json.loads(Submission("b", "warmq", 6, "", overrides).options)
    assert answer_schema(options["set"]) == SCHEMA
    assert answer_schema({"structured_outputs": {"choice": ["a"]}}) is None
    assert answer_schema({}) is None
    text = {"structured_outputs": {"json": json.dumps(SCHEMA)}}
    wrapped = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    }
    assert answer_schema(text) == answer_schema(wrapped) == SCHEMA
