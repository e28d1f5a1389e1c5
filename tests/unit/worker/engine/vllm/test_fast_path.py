"""The fast path: which bodies are plain and of one form, and what is noted of a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from contract.openai.body import CHAT_URL, COMPLETION_URL, MESSAGES_URL
from contract.openai.pooling import EMBEDDINGS_URL, POOLING_TYPES, RERANK_URLS, SCORE_URLS
from worker.engine.vllm.fastpath.learning import (
    OBSERVED,
    Inconclusive,
    Observation,
    observe_contexts,
    split_name,
)
from worker.engine.vllm.fastpath.pooling import key_of as pooling_key
from worker.engine.vllm.fastpath.pooling import texts_of
from worker.engine.vllm.fastpath.texts import key_of
from worker.engine.vllm.turns import SHORT_PROMPT

USER = {"role": "user", "content": "a"}
SCORE_URL = SCORE_URLS[0]
PAIR = {"text_1": "a", "text_2": "b"}
CONTEXT = SimpleNamespace(request_id="embd-a", engine_inputs=None)


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


@pytest.mark.parametrize("name", ["response_format", "structured_outputs"])
def test_bodies_with_other_constraints_are_of_other_forms(name: str) -> None:
    forms = {
        key_of(COMPLETION_URL, {"prompt": "a"} | given)
        for given in ({}, {name: {"type": "json_object"}}, {name: {"choice": ["a" * 9000]}})
    }
    assert len(forms) == 3
    assert None not in forms
    assert key_of(COMPLETION_URL, {"prompt": "a", name: {"choice": ["a" * 20_000]}}) is None


def test_chats_and_completions_are_of_two_forms() -> None:
    chat = key_of(CHAT_URL, {"messages": [USER]})
    assert None is not chat != key_of(COMPLETION_URL, {"prompt": "a"})


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""}, {"prompt": ["a"]}, {"prompt": [1, 2]}, {},
        {"prompt": "a" * (SHORT_PROMPT + 1)},
        {"prompt": "a", "n": 2}, {"prompt": "a", "logprobs": 1}, {"prompt": "a", "echo": True},
        {"prompt": "a", "stream": True},
        {"prompt": "a", "of an unknown name": None}, {"prompt": "a", "seed": 2**70},
        {"prompt": "a", "stop": "\ud800"}, {"prompt": "a", "stop_token_ids": [1] * 16_384},
    ],
)  # fmt: skip
def test_a_completion_that_is_not_plain_has_no_form(body: dict[str, Any]) -> None:
    assert key_of(COMPLETION_URL, body) is None


@pytest.mark.parametrize(
    "messages",
    [
        None, [], "a", ["a"], [USER | {"name": "b"}], [USER | {"content": None}],
        [USER | {"content": [{"type": "text", "text": "a"}]}], [{"role": "user"}],
        [USER | {"role": "tool"}], [USER | {"content": "a" * SHORT_PROMPT}, USER],
    ],
)  # fmt: skip
def test_a_chat_that_is_not_plain_has_no_form(messages: Any) -> None:
    assert key_of(CHAT_URL, {"messages": messages}) is None


def test_only_chats_and_completions_have_forms() -> None:
    assert key_of(MESSAGES_URL, {"messages": [USER]}) is None
    assert key_of("/v1/embeddings", {"input": "a"}) is None


def test_names_are_made_of_another_id_as_of_the_first() -> None:
    assert "other".join(split_name("cmpl-first-0", "first")) == "cmpl-other-0"


@pytest.mark.parametrize("request_id", ["c", "0", "-", "l-l", "cmpl", ""])
def test_nothing_is_learned_from_an_id_that_may_be_part_of_the_name(request_id: str) -> None:
    with pytest.raises(Inconclusive):
        split_name(f"cmpl-{request_id}-0", request_id)


def test_a_name_without_the_id_is_made_in_another_way() -> None:
    with pytest.raises(ValueError, match="another way"):
        split_name("cmpl-123-0", "first")


# -- embeddings and scores --------------------------------------------------------


def test_bodies_that_differ_only_in_what_is_pooled_are_of_one_form() -> None:
    one = pooling_key(EMBEDDINGS_URL, {"input": "a", "encoding_format": "float", "user": "x"})
    other = pooling_key(EMBEDDINGS_URL, {"user": "x", "encoding_format": "float", "input": "b"})
    assert one == other is not None
    assert (
        pooling_key(SCORE_URL, PAIR) == pooling_key(SCORE_URL, PAIR | {"text_2": "c"}) is not None
    )


@pytest.mark.parametrize(
    "rest",
    [
        {"encoding_format": "base64"}, {"dimensions": 8}, {"truncate_prompt_tokens": 9},
        {"use_activation": False}, {"add_special_tokens": False}, {"model": "m"},
    ],
)  # fmt: skip
def test_embeddings_with_other_options_are_of_other_forms(rest: dict[str, Any]) -> None:
    assert None is not pooling_key(EMBEDDINGS_URL, {"input": "a"} | rest)
    assert pooling_key(EMBEDDINGS_URL, {"input": "a"} | rest) != pooling_key(
        EMBEDDINGS_URL, {"input": "a"}
    )


def test_each_url_and_spelling_has_its_own_forms() -> None:
    keys = [pooling_key(url, PAIR) for url in SCORE_URLS]
    keys += [pooling_key(SCORE_URL, {"data_1": "a", "data_2": "b"})]
    keys += [pooling_key(SCORE_URL, {"queries": "a", "documents": "b"})]
    keys += [pooling_key(EMBEDDINGS_URL, {"input": text}) for text in ("a", ["a"])]
    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "body",
    [
        {}, {"input": ""}, {"input": []}, {"input": [1, 2]}, {"input": [[1]]}, {"input": [1]},
        {"input": ["a", "b"]}, {"input": [""]}, {"input": "a" * (SHORT_PROMPT + 1)},
        {"messages": [{"role": "user", "content": "a"}]}, {"input": "a", "priority": 1},
        {"input": "a", "embed_dtype": "float16"}, {"input": "a", "cache_salt": "b"},
        {"input": "a", "of an unknown name": None}, {"input": "a", "text_1": "b"},
        {"input": "a", "user": "\ud800"}, {"input": "a", "user": "b" * 20_000},
    ],
)  # fmt: skip
def test_an_embedding_that_is_not_plain_has_no_form(body: dict[str, Any]) -> None:
    assert pooling_key(EMBEDDINGS_URL, body) is None


@pytest.mark.parametrize(
    "body",
    [
        {}, {"text_1": "a"}, PAIR | {"text_2": ["b", "c"]}, PAIR | {"text_1": {"content": []}},
        PAIR | {"text_1": ""}, PAIR | {"instruction": "c"}, PAIR | {"max_tokens_per_doc": 3},
        PAIR | {"data_1": "a", "data_2": "b"}, {"text_1": "a", "data_2": "b"},
        PAIR | {"text_1": "a" * (SHORT_PROMPT + 1)},
    ],
)  # fmt: skip
def test_a_score_that_is_not_plain_has_no_form(body: dict[str, Any]) -> None:
    assert pooling_key(SCORE_URL, body) is None


def test_rerankings_have_no_forms() -> None:
    assert {*RERANK_URLS, *SCORE_URLS, EMBEDDINGS_URL} == set(POOLING_TYPES)
    for url in RERANK_URLS:
        assert pooling_key(url, {"query": "a", "documents": ["b"]}) is None


def test_a_text_in_a_list_of_one_is_that_text() -> None:
    assert texts_of({"input": ["a"]}) == texts_of({"input": "a"}) == ("a",)
    assert texts_of({"text_1": "a", "text_2": ["b"]}) == ("a", "b")


# -- what is noted ----------------------------------------------------------------


class Renders:
    """As of 0.30: a method that is awaited."""

    async def _preprocessing(self, processor: Any, context: Any) -> list[Any]:
        return [processor, context]


class RendersInThread:
    """As of 0.26: what is awaited is an attribute, and calls the method in a thread."""

    def __init__(self) -> None:
        self._preprocessing_async = Renders()._preprocessing

    def _preprocessing(self, processor: Any, context: Any) -> None:
        raise AssertionError("it would run on the loop")


async def test_the_context_of_a_request_with_a_lesson_is_noted() -> None:
    for serving, name in (
        (Renders(), "_preprocessing"), (RendersInThread(), "_preprocessing_async")
    ):  # fmt: skip
        observe_contexts(serving)
        assert await getattr(serving, name)("processor", CONTEXT) == ["processor", CONTEXT]
        token = OBSERVED.set(observed := Observation())
        assert await getattr(serving, name)("processor", CONTEXT) == ["processor", CONTEXT]
        OBSERVED.reset(token)
        assert observed.contexts == [CONTEXT]
