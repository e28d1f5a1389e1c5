"""Limits of one request are the same on every release of vLLM: room for the answer, and cuts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from contract.errors import RequestRejected

pytestmark = pytest.mark.timeout(180)  # importing vLLM takes seconds

CONTEXT, DEFAULT = 1024, 256
MODEL = SimpleNamespace(max_model_len=CONTEXT)


def request(chat: bool, ceiling: int | None = None, **fields: Any) -> Any:
    """Return a request in the class that this worker gives vLLM."""
    from worker.engine.vllm.request_classes import make_request_classes

    form = make_request_classes(CONTEXT, DEFAULT, ceiling)[0 if chat else 1]
    content = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    return pydantic.TypeAdapter(form).validate_python(content | fields)


def run(asked: Any, prompt: int) -> Any:
    """Return the sampling parameters, as vLLM makes them of a prompt of so many tokens."""
    from worker.engine.vllm.names import VLLMValidationError

    limits = asked.build_tok_params(MODEL)
    if limits.max_input_tokens < prompt:  # vLLM's own check, which up to 0.31 reserves the answer
        raise VLLMValidationError("maximum context length", parameter="input_tokens")
    wanted = [asked.limit()[1] or DEFAULT, CONTEXT - prompt, asked.ceiling]
    return asked.to_sampling_params(min(n for n in wanted if n is not None), {})


def refusal(error: Exception) -> RequestRejected:
    from worker.engine.vllm.errors import rejected

    return rejected(error, {})


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(("prompt", "limit"), [(1021, 4), (1024, 1), (1, 1024), (1020, 1024)])
def test_a_prompt_that_leaves_less_than_was_asked_for_is_refused(
    chat: bool, prompt: int, limit: int
) -> None:
    with pytest.raises(Exception) as caught:
        run(request(chat, max_tokens=limit), prompt)
    assert refusal(caught.value).code == "context_length_exceeded"


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("prompt", "limit", "granted"),
    [(1020, 4, 4), (1023, 1, 1), (1000, None, 24), (5, None, DEFAULT)],
)
def test_what_fits_gets_all_it_asked_for_and_the_default_is_cut(
    chat: bool, prompt: int, limit: int | None, granted: int
) -> None:
    fields = {} if limit is None else {"max_tokens": limit}
    assert run(request(chat, **fields), prompt).max_tokens == granted


def test_a_prompt_that_fills_the_context_is_refused_though_it_asks_for_no_number() -> None:
    with pytest.raises(Exception) as caught:
        run(request(True), CONTEXT)
    told = refusal(caught.value)
    assert told.code == "context_length_exceeded"
    assert "leaves none for an answer" in told.message


def test_beam_search_is_held_to_the_same() -> None:
    asked = request(False, max_tokens=4, use_beam_search=True, n=2)
    asked.build_tok_params(MODEL)
    assert asked.to_beam_search_params(4, {}).max_tokens == 4
    with pytest.raises(Exception, match="1021 tokens"):
        asked.to_beam_search_params(3, {})


def test_a_ceiling_of_the_operator_is_no_lack_of_room() -> None:
    assert run(request(True, ceiling=8, max_tokens=100), 900).max_tokens == 8


def test_the_newer_name_of_the_limit_counts_for_chats() -> None:
    with pytest.raises(Exception) as caught:
        run(request(True, max_completion_tokens=4, max_tokens=1), 1021)
    assert refusal(caught.value).code == "context_length_exceeded"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [-5, 0])
def test_a_limit_below_one_is_a_bad_value_of_its_field(field: str, value: int) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        request(True, **{field: value})
    told = refusal(caught.value)
    assert (told.code, told.field) == ("invalid_request", f"body.{field}")


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(("fields", "kept"), [({}, CONTEXT - DEFAULT), ({"max_tokens": 100}, 924)])
def test_minus_one_cuts_the_prompt_to_what_the_answer_leaves(
    chat: bool, fields: dict[str, int], kept: int
) -> None:
    params = request(chat, truncate_prompt_tokens=-1, **fields).build_tok_params(MODEL)
    assert params.truncate_prompt_tokens == kept


def test_a_default_longer_than_the_context_leaves_half_of_it_to_the_prompt() -> None:
    from worker.engine.vllm.request_classes import make_request_classes

    form = make_request_classes(CONTEXT, 32_768, None)[1]
    params = form(prompt="x", truncate_prompt_tokens=-1).build_tok_params(MODEL)
    assert params.truncate_prompt_tokens == CONTEXT // 2


@pytest.mark.parametrize(
    "fields", [{"truncate_prompt_tokens": 1000, "max_tokens": 100},
               {"truncate_prompt_tokens": -1, "max_tokens": CONTEXT}],
)  # fmt: skip
def test_a_cut_that_leaves_no_room_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(Exception) as caught:
        request(False, **fields).build_tok_params(MODEL)
    assert str(CONTEXT) in refusal(caught.value).message or "924" in str(caught.value)
    assert refusal(caught.value).field in ("truncate_prompt_tokens", "max_tokens")
