"""The error of a row in a line is told as text, whoever wrote the line; it decides nothing else."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from contract.errors import RequestRejected
from contract.openai.lines import parse_line
from gateway.batches.runner.row_errors import explain, line_of_error

CHAT = {"messages": [{"role": "user", "content": "x"}], "model": "m"}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
TOLD = {"message": "row 7, column text: is empty", "code": "invalid_request", "field": "text"}


def told(row_error: Any, body: object = CHAT) -> RequestRejected:
    line = orjson.dumps(LINE | {"body": body, "row_error": row_error})
    with pytest.raises(RequestRejected) as refused:
        parse_line(line)
    return explain(3, line, refused.value)


def test_a_row_has_its_own_error_and_keeps_what_selects_its_queue() -> None:
    error = RequestRejected(TOLD["message"], field="text")
    line = line_of_error(orjson.dumps(LINE), {"max_tokens": 5}, error)
    assert orjson.loads(line) == LINE | {"body": {"model": "m", "max_tokens": 5}, "row_error": TOLD}
    for body in (CHAT, {}):
        found = told(TOLD, body)
        assert (found.message, found.code) == (TOLD["message"], "invalid_request")
        assert (found.field, found.custom_id) == ("text", "a")


def test_a_line_with_an_error_never_runs() -> None:
    for row_error in (TOLD, None, {}, "x"):
        told(row_error)


@pytest.mark.parametrize("wrong", [
    None, {}, "x", [1], {"message": "x"}, TOLD | {"code": "poison"}, TOLD | {"code": "a" * 9},
    TOLD | {"code": "duplicate_custom_id"}, TOLD | {"message": ""}, TOLD | {"message": 5},
    TOLD | {"field": 5}, [[[]]] * 40,
])  # fmt: skip
def test_another_error_is_not_told(wrong: object) -> None:
    found = told(wrong)
    assert found.message.startswith("line 3, field row_error: unknown in a batch line")
    assert found.code == "unknown_field"


def test_a_strangers_text_is_bounded_and_has_no_control_characters() -> None:
    found = told({"message": "a\x1b[2J\n" + "b" * 5000, "code": "invalid_request",
                  "field": "\x1b" * 500})  # fmt: skip
    assert found.message.isprintable() and len(found.message) < 1100
    assert found.field is not None and found.field.isprintable() and len(found.field) < 400


def test_a_line_that_is_no_object_keeps_its_error() -> None:
    for line in (b"[]", b'"row_error"', b'{"row_error": ', b""):
        with pytest.raises(RequestRejected) as refused:
            parse_line(line)
        assert explain(3, line, refused.value).message.startswith("line 3, not ")
