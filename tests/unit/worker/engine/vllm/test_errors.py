"""What vLLM's forms refuse is told by the form that was meant, with the field's whole path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
from openai.types.chat import ChatCompletionContentPartParam

from contract.errors import RequestFailed, RequestRejected
from worker.engine.vllm.errors import Folders, in_media, wrong_field

MESSAGES = [{"role": "user", "content": "x"}]
STOPS = ["a", "b", "c", "d", "e"]
RESPONSE = {"type": "json_schema", "json_schema": {"name": "n", "schema": 5}}
CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"stop": STOPS}, "stop", "at most 4 items"),
    ({"stop": ["a", 5]}, "stop.1", "valid string"),
    ({"response_format": RESPONSE}, "response_format.json_schema.schema", "valid dictionary"),
    ({"response_format": {"type": "js"}}, "response_format.type",
     "'text', 'json_object' or 'json_schema', 'structural_tag'"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "required"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field", "problem"), CASES, ids=str)
def test_the_form_that_was_meant_tells(fields: dict[str, Any], field: str, problem: str) -> None:
    from worker.engine.vllm.names import ChatCompletionRequest

    body = {"messages": MESSAGES} | fields
    with pytest.raises(pydantic.ValidationError) as raised:
        pydantic.TypeAdapter(ChatCompletionRequest).validate_python(body)
    found = wrong_field(raised.value, body)
    assert found[0] == field
    assert problem in found[1]


PARTS: list[tuple[Any, str, str]] = [
    ({"type": "image"}, "type", "'text', 'image_url', 'input_audio', 'file'"),
    ({"type": "text"}, "text", "required"),
    ({"type": "text", "text": 5}, "text", "valid string"),
    ({"type": "image_url", "image_url": {"url": 5}}, "image_url.url", "valid string"),
]


@pytest.mark.parametrize(("part", "field", "problem"), PARTS, ids=str)
def test_a_part_of_a_content_has_its_whole_path(part: Any, field: str, problem: str) -> None:
    content = [{"type": "text", "text": "x"}, part]
    with pytest.raises(pydantic.ValidationError) as raised:
        pydantic.TypeAdapter(list[ChatCompletionContentPartParam]).validate_python(content)
    body = {"messages": [*MESSAGES, {"role": "user", "content": content}]}
    found = wrong_field(raised.value, body)
    assert found[0] == f"messages.1.content.1.{field}"
    assert problem in found[1]


def test_a_response_that_has_no_such_part() -> None:
    from worker.engine.vllm.names import ResponsesRequest

    body = {"input": [{"role": "user", "content": [{"type": "image"}]}]}
    with pytest.raises(pydantic.ValidationError) as raised:
        pydantic.TypeAdapter(ResponsesRequest).validate_python(body)
    assert wrong_field(raised.value, body)[0] == "input.0.content.0.type"


@pytest.mark.parametrize(
    "error", [KeyError("x"), IndexError("i"), AttributeError("a"), AssertionError("s")], ids=repr
)
def test_what_vllm_cannot_take_is_the_lines_error_in_its_own_words(error: Exception) -> None:
    from worker.engine.vllm.errors import REFUSALS, rejected

    assert isinstance(error, REFUSALS)
    found = rejected(error, {})
    assert (found.code, f"{type(error).__name__}: {error}" in found.message) == (
        "invalid_request",
        True,
    )


def test_an_error_of_this_project_s_own_code_is_no_refusal_of_the_engine() -> None:
    from worker.engine.vllm.errors import Folders, is_ours

    def raised(cause: Callable[[], object]) -> Exception:
        try:
            cause()
        except (KeyError, AttributeError) as error:
            return error
        raise AssertionError

    broken = Folders([])
    del broken._known
    assert is_ours(raised(lambda: broken.hidden("a")))
    assert not is_ours(raised(lambda: dict[str, int]()["a"]))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"prompt": "x", "response_format": {"type": "text"}, "tool_choice": "auto"},
         "request_failed"),
        ({"response_format": {"type": "json_object"}}, "invalid_request"),
        ({"structured_outputs": {"grammar": "root ::= a\na ::= root"}}, "invalid_request"),
        ({"tool_choice": "required"}, "invalid_request"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "invalid_request"),
    ],
)  # fmt: skip
def test_an_answer_that_ends_in_an_error_is_its_constraints(body: Any, code: str) -> None:
    from vllm.exceptions import GenerationError

    from worker.engine.vllm.errors import ended_in_error, failed

    for found in (ended_in_error(body), failed(GenerationError(), body)):
        assert found.code == code
        assert ("finish_reason error" in found.message) == (code == "invalid_request")
    assert failed(OSError("x"), body).message == "OSError: x"


# -- in the words of others ----------------------------------------------------


@pytest.mark.parametrize("written", ["./models/tiny", "{here}/models/tiny", "models/tiny"])
def test_no_error_says_where_the_model_lies(written: str) -> None:
    here = str(Path.cwd())
    folder = written.format(here=here)
    for name in ("tiny", folder):
        folders = Folders([(folder, name), ("/adapters/one", "one")])
        for text in (folder, f"{here}/models/tiny"):
            error = RequestRejected(f"{text} is not a multimodal model")
            folders.hide(error)
            assert error.message == str(error) == "tiny is not a multimodal model"
        failed = RequestFailed(f"ValueError: no {here}/worker/x.py, no /adapters/one/a.json")
        folders.hide(failed)
        assert str(failed) == "ValueError: no …/worker/x.py, no one/a.json"


def test_other_words_with_slashes_are_left_alone() -> None:
    folders = Folders([("tiny", "tiny"), (".", "x"), ("org/model", "org/model")])
    for text in ("see https://example.com/models/tiny", "tiny. 1/2", "regex /a/b/", "a/org/model"):
        assert folders.hidden(text) == text


def test_only_what_media_brought_is_a_mistake() -> None:
    def raised(error: Exception, file: str) -> Exception:
        scope: dict[str, Any] = {"error": error}
        try:
            exec(compile("raise error", file, "exec"), scope)
        except Exception as caught:
            return caught
        raise AssertionError

    media = "/x/vllm/multimodal/media/connector.py"
    assert in_media(raised(RuntimeError("Cannot load local files"), media))
    assert not in_media(raised(ConnectionError("no route"), media))
    assert not in_media(raised(TimeoutError("slow"), media))
    assert not in_media(raised(MemoryError(), media))
    assert not in_media(raised(RuntimeError("CUDA error"), "/x/vllm/v1/engine/core.py"))
