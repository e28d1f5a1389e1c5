"""Which bodies may be answered past vLLM's serving classes, and which of them are of one form."""

from __future__ import annotations

from typing import Any

import pytest

from contract.openai.body import CHAT_URL, COMPLETION_URL, MESSAGES_URL
from worker.engine.vllm.plans import LONGEST, Unclear, around, key_of

USER = {"role": "user", "content": "a"}


def test_bodies_that_differ_only_in_their_prompt_are_of_one_form() -> None:
    one = key_of(COMPLETION_URL, {"prompt": "a", "max_tokens": 4, "stop": ["x"]})
    other = key_of(COMPLETION_URL, {"stop": ["x"], "max_tokens": 4, "prompt": "b"})
    assert one == other is not None
    assert key_of(CHAT_URL, {"messages": [USER]}) == key_of(CHAT_URL, {"messages": [USER, USER]})


@pytest.mark.parametrize("rest", [{"max_tokens": 5}, {"temperature": 1}, {"temperature": 1.0}, {}])
def test_bodies_with_other_options_are_of_other_forms(rest: dict[str, Any]) -> None:
    assert key_of(COMPLETION_URL, {"prompt": "a"} | rest) != key_of(
        COMPLETION_URL, {"prompt": "a", "max_tokens": 4}
    )


def test_chats_and_completions_are_of_two_forms() -> None:
    chat = key_of(CHAT_URL, {"messages": [USER]})
    assert None is not chat != key_of(COMPLETION_URL, {"prompt": "a"})


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""}, {"prompt": ["a"]}, {"prompt": [1, 2]}, {}, {"prompt": "a" * (LONGEST + 1)},
        {"prompt": "a", "n": 2}, {"prompt": "a", "logprobs": 1}, {"prompt": "a", "echo": True},
        {"prompt": "a", "structured_outputs": {"regex": "a"}}, {"prompt": "a", "stream": True},
        {"prompt": "a", "of an unknown name": None}, {"prompt": "a", "seed": 2**70},
        {"prompt": "a", "stop": "\ud800"}, {"prompt": "a", "stop_token_ids": [1] * 4096},
    ],
)  # fmt: skip
def test_a_completion_that_is_not_plain_has_no_form(body: dict[str, Any]) -> None:
    assert key_of(COMPLETION_URL, body) is None


@pytest.mark.parametrize(
    "messages",
    [
        None, [], "a", ["a"], [USER | {"name": "b"}], [USER | {"content": None}],
        [USER | {"content": [{"type": "text", "text": "a"}]}], [{"role": "user"}],
        [USER | {"role": "tool"}], [USER | {"content": "a" * LONGEST}, USER],
    ],
)  # fmt: skip
def test_a_chat_that_is_not_plain_has_no_form(messages: Any) -> None:
    assert key_of(CHAT_URL, {"messages": messages}) is None


def test_only_chats_and_completions_have_forms() -> None:
    assert key_of(MESSAGES_URL, {"messages": [USER]}) is None
    assert key_of("/v1/embeddings", {"input": "a"}) is None


def test_names_are_made_of_another_id_as_of_the_first() -> None:
    assert "other".join(around("cmpl-first-0", "first")) == "cmpl-other-0"


@pytest.mark.parametrize("request_id", ["c", "0", "-", "l-l", "cmpl", ""])
def test_nothing_is_learned_from_an_id_that_may_be_part_of_the_name(request_id: str) -> None:
    with pytest.raises(Unclear):
        around(f"cmpl-{request_id}-0", request_id)


def test_a_name_without_the_id_is_made_in_another_way() -> None:
    with pytest.raises(ValueError, match="another way"):
        around("cmpl-123-0", "first")
