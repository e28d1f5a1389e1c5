"""A text that is neither a column nor a template is the same in every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.commands.table_sources import errors_of, parquet, requests_of

from producer.client.client import _source
from producer.input.options import BadOption
from producer.input.source import open_source

USER = {"messages.user": "{text}"}


def table(folder: Path) -> str:
    columns = {"id": [1, 2], "text": ["a", "b"], "labels": ["x", "y"]}
    return parquet(folder / "in.parquet", columns)


def test_a_text_that_is_no_column_is_in_each_row(tmp_path: Path):
    pairs = {
        "messages.system": "You are a librarian.", **USER, "max_tokens": "64",
        "stop": '["e"]', "user": "7",
    }  # fmt: skip
    source = open_source(table(tmp_path), pairs)
    assert requests_of(source) == [
        {
            "max_tokens": 64, "stop": ["e"], "user": "7",
            "messages": [
                {"role": "system", "content": "You are a librarian."},
                {"role": "user", "content": text},
            ],
        }
        for text in ("a", "b")
    ]  # fmt: skip


def test_the_system_message_comes_first_whatever_the_order_of_the_options(tmp_path: Path):
    pairs = {"messages.assistant": "Yes?", **USER, "messages.system": "You are a librarian."}
    first, _ = requests_of(open_source(table(tmp_path), pairs))
    assert [one["role"] for one in first["messages"]] == ["system", "assistant", "user"]


@pytest.mark.parametrize("text", ["Be textual.", "Label it: x", "64"])
def test_a_sentence_is_not_a_misspelt_column(tmp_path: Path, text: str):
    source = open_source(table(tmp_path), {"messages.system": text, **USER})
    assert {r["messages"][0]["content"] for r in requests_of(source)} == {text}


def test_braces_of_a_constant_are_written_twice(tmp_path: Path):
    source = open_source(table(tmp_path), {"messages.system": 'Write {{"a": 1}}', **USER})
    assert [r["messages"][0]["content"] for r in requests_of(source)] == ['Write {"a": 1}'] * 2
    with pytest.raises(BadOption, match=r"write \{\{ and \}\} for"):
        open_source(table(tmp_path), {"messages.system": 'Write {"a": 1}', **USER})


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ({"messages.system": "label", **USER}, "there is no column 'label'; did you mean labels?"),
        ({"messages.system": "ID", **USER}, "there is no column 'ID'; did you mean id?"),
        ({"prompt": "hello there"}, "field prompt: there is no column 'hello there'; there are id"),
        ({"messages.system": "Be kind.", "messages.user": "Hello!"}, "no column 'Be kind.'"),
        ({"max_tokens": "lots", **USER}, "no column 'lots'; there are id, text, labels; as a"),
        ({"custom_id": "seven", **USER}, "field custom_id: there is no column 'seven'"),
        ({"url": "/v1/wrong", "prompt": "text"}, "field url: there is no column '/v1/wrong'"),
    ],
)
def test_a_constant_that_would_be_a_mistake_is_refused(
    tmp_path: Path, pairs: dict[str, str], told: str
):
    with pytest.raises(BadOption) as error:
        open_source(table(tmp_path), pairs)
    assert told in error.value.message


def test_a_constant_url_asks_its_endpoint(tmp_path: Path):
    source = open_source(table(tmp_path), {"url": "/v1/responses", "input": "text"})
    assert requests_of(source) == [
        {"url": "/v1/responses", "body": {"input": text}} for text in ("a", "b")
    ]
    assert not errors_of(open_source(table(tmp_path), {"url": "/v1/responses", "input": "text"}))


ROWS = [{"text": "a"}, {"text": "b", "n": 5}]


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), iter(ROWS)])
def test_rows_of_a_program_have_constants_too(rows: Any):
    columns = {"messages.system": "Be kind.", "messages.user": "text", "max_tokens": "n"}
    found = requests_of(_source(rows, columns))
    assert [r["messages"][0]["content"] for r in found] == ["Be kind."] * 2
    assert [r.get("max_tokens") for r in found] == [None, 5]


def test_a_constant_of_an_iterator_that_later_is_a_column_fails_that_row():
    rows = iter([{"text": "a"}, {"text": "b", "rules": "Be kind."}])
    found = errors_of(_source(rows, {"messages.system": "rules", "messages.user": "text"}))
    assert [(number, error.field) for number, error in found.items()] == [(2, "rules")]


def test_a_bad_first_row_of_an_iterator_costs_no_other(tmp_path: Path):
    rows = iter([{"id": 1}, {"text": "b"}])
    source = _source(rows, {"prompt": "text"})
    assert list(errors_of(source)) == [1]
