"""What a body becomes for Triton's vLLM backend, and what its answer becomes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from contract.errors import RequestRejected
from contract.openai.body import CHAT_URL, COMPLETION_URL
from demo.stack import MODEL
from worker.engine import EngineRequest
from worker.engine.triton.request import PASSED, Prompts, check_fields, respond, sampling


@cache
def prompts() -> Prompts:
    """Return the shipped model's tokenizer; it takes a second to load."""
    return Prompts(str(MODEL))


def chat_of(content: Any = "Hello", **fields: Any) -> EngineRequest:
    """Return a chat request."""
    return EngineRequest(CHAT_URL, {"messages": [{"role": "user", "content": content}], **fields})


def completion(prompt: Any, **fields: Any) -> EngineRequest:
    """Return a completion request."""
    return EngineRequest(COMPLETION_URL, {"prompt": prompt, **fields})


def params(body: dict[str, Any], tokens: int = 10, room: int | None = None) -> dict[str, Any]:
    """Return sampling parameters where 1024 is the default length."""
    return sampling(body, tokens, {"top_k": 7}, 1024, room)


def test_a_chat_becomes_text_that_the_server_reads_as_the_chats_own_tokens() -> None:
    prompt = prompts().prompt_of(chat_of("What is 3 plus 4?"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    messages = [{"role": "user", "content": "What is 3 plus 4?"}]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    assert tokenizer(prompt.text)["input_ids"] == wanted["input_ids"]
    assert prompt.tokens == len(wanted["input_ids"])


def test_text_parts_are_joined_as_vllm_joins_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prompts().prompt_of(chat_of(parts)) == prompts().prompt_of(chat_of("one\ntwo"))


def test_a_completion_is_sent_as_it_is() -> None:
    assert prompts().prompt_of(completion("Once")).text == "Once"
    assert prompts().prompt_of(completion(["Once"])).text == "Once"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (completion([1, 2]), "prompt"),
        (completion(["a", "b"]), "prompt"),
        (chat_of([{"type": "image_url", "image_url": {"url": "x"}}]), "messages.0.content"),
        (chat_of(chat_template_kwargs={"chat_template": "{{1}}"}), "chat_template_kwargs."),
        (EngineRequest(CHAT_URL, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
         "messages.0.tool_calls"),
    ],
)  # fmt: skip
def test_a_prompt_that_is_no_text_is_refused_by_its_field(
    request_: EngineRequest, field: str
) -> None:
    with pytest.raises(RequestRejected, match=f"field body.{field}") as raised:
        prompts().prompt_of(request_)
    assert ";" in raised.value.message, "a remedy"


@pytest.mark.parametrize(
    "field",
    [
        {"n": 2}, {"logprobs": True}, {"logprobs": 0}, {"top_logprobs": 3}, {"echo": True},
        {"prompt_logprobs": 1}, {"logit_bias": {"5": 1.0}}, {"use_beam_search": True},
        {"tools": [{}]}, {"tool_choice": "auto"}, {"truncate_prompt_tokens": 5}, {"priority": 3},
        {"cache_salt": "x"}, {"chat_template": "x"}, {"length_penalty": 2.0},
    ],
)  # fmt: skip
def test_what_the_backend_cannot_express_is_refused_by_name_with_a_remedy(
    field: dict[str, Any],
) -> None:
    (name,) = field
    with pytest.raises(RequestRejected, match=f"field body.{name}: .*; .*") as raised:
        check_fields(chat_of(**field).body)
    assert raised.value.field == f"body.{name}"


def test_values_that_ask_for_nothing_are_let_through() -> None:
    quiet = {
        "n": 1, "logprobs": None, "echo": False, "tools": [], "tool_choice": "none", "model": "m",
        "user": "u", "temperature": 0, "priority": 0, "response_format": {"type": "text"},
    }  # fmt: skip
    check_fields(chat_of(**quiet).body)


def test_sampling_parameters_keep_their_names_and_the_models_defaults() -> None:
    body = {"temperature": 0, "stop": ["x"], "seed": 3, "model": "m", "min_p": None}
    assert params(body) == {
        "temperature": 0, "stop": ["x"], "seed": 3, "top_k": 7, "max_tokens": 1024,
    }  # fmt: skip
    assert params({"top_k": 3})["top_k"] == 3


def test_a_length_that_nobody_named_is_cut_to_the_room_and_a_named_one_is_refused() -> None:
    assert params({}, tokens=1000, room=1024)["max_tokens"] == 24
    assert params({"max_completion_tokens": 24}, 1000, 1024)["max_tokens"] == 24
    for body, tokens in (({"max_tokens": 25}, 1000), ({}, 1024)):
        with pytest.raises(RequestRejected, match="context length is 1024") as raised:
            params(body, tokens, 1024)
        assert raised.value.code == "context_length_exceeded"
    assert params({"max_tokens": 9000}, 1000)["max_tokens"] == 9000, "the server will know"


def test_a_structure_is_json_within_the_json() -> None:
    schema = {"type": "object"}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = params({"response_format": asked})["structured_outputs"]
    assert json.loads(found) == {"json": schema}
    found = params({"response_format": {"type": "json_object"}})["structured_outputs"]
    assert json.loads(found) == {"json_object": True}
    found = params({"structured_outputs": {"regex": "a+"}})["structured_outputs"]
    assert json.loads(found) == {"regex": "a+"}
    with pytest.raises(RequestRejected, match="response_format"):
        params({"response_format": {"type": "structural_tag"}})


@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_has_the_form_of_the_endpoint(chat: bool) -> None:
    asked = chat_of(model="mine") if chat else completion("Once")
    body = json.loads(respond(asked, "r1", "vllm_model", "text", ("length", 3, 4)))
    (choice,) = body["choices"]
    assert body["object"] == ("chat.completion" if chat else "text_completion")
    assert (choice["message"]["content"] if chat else choice["text"]) == "text"
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert body["model"] == ("mine" if chat else "vllm_model")
    assert body["id"].endswith("r1")


def test_vllm_takes_what_is_sent_the_way_the_backend_decodes_it() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    assert set(SamplingParams.__struct_fields__) >= PASSED
    body = {
        "temperature": 0, "stop": ["x"], "seed": 3, "bad_words": ["y"], "min_tokens": 1,
        "max_tokens": 9, "response_format": {"type": "json_object"},
    }  # fmt: skip
    decoded = json.loads(json.dumps(params(body)))
    structure = StructuredOutputsParams(**json.loads(decoded.pop("structured_outputs")))
    found = SamplingParams(**decoded, structured_outputs=structure)
    assert (found.temperature, found.max_tokens, found.top_k) == (0, 9, 0)
    assert structure.json_object is True
