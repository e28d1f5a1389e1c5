"""Which embeddings and scores may be answered past vLLM's serving classes, and their forms."""

from __future__ import annotations

from typing import Any

import pytest

from contract.openai.pooling import EMBEDDINGS_URL, POOLING_TYPES, RERANK_URLS, SCORE_URLS
from worker.engine.vllm.plans import LONGEST
from worker.engine.vllm.pooling_forms import key_of, texts_of

SCORE_URL = SCORE_URLS[0]
PAIR = {"text_1": "a", "text_2": "b"}


def test_bodies_that_differ_only_in_their_texts_are_of_one_form() -> None:
    one = key_of(EMBEDDINGS_URL, {"input": "a", "encoding_format": "float", "user": "x"})
    other = key_of(EMBEDDINGS_URL, {"user": "x", "encoding_format": "float", "input": "b"})
    assert one == other is not None
    assert key_of(SCORE_URL, PAIR) == key_of(SCORE_URL, PAIR | {"text_2": "c"}) is not None


@pytest.mark.parametrize(
    "rest",
    [
        {"encoding_format": "base64"}, {"dimensions": 8}, {"truncate_prompt_tokens": 9},
        {"use_activation": False}, {"add_special_tokens": False}, {"model": "m"},
    ],
)  # fmt: skip
def test_bodies_with_other_options_are_of_other_forms(rest: dict[str, Any]) -> None:
    assert None is not key_of(EMBEDDINGS_URL, {"input": "a"} | rest)
    assert key_of(EMBEDDINGS_URL, {"input": "a"} | rest) != key_of(EMBEDDINGS_URL, {"input": "a"})


def test_each_url_and_spelling_has_its_own_forms() -> None:
    keys = [key_of(url, PAIR) for url in SCORE_URLS]
    keys += [key_of(SCORE_URL, {"data_1": "a", "data_2": "b"})]
    keys += [key_of(SCORE_URL, {"queries": "a", "documents": "b"})]
    keys += [key_of(EMBEDDINGS_URL, {"input": text}) for text in ("a", ["a"])]
    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "body",
    [
        {}, {"input": ""}, {"input": []}, {"input": [1, 2]}, {"input": [[1]]}, {"input": [1]},
        {"input": ["a", "b"]}, {"input": [""]}, {"input": "a" * (LONGEST + 1)},
        {"messages": [{"role": "user", "content": "a"}]}, {"input": "a", "priority": 1},
        {"input": "a", "embed_dtype": "float16"}, {"input": "a", "cache_salt": "b"},
        {"input": "a", "of an unknown name": None}, {"input": "a", "text_1": "b"},
        {"input": "a", "user": "\ud800"}, {"input": "a", "user": "b" * 5000},
    ],
)  # fmt: skip
def test_an_embedding_that_is_not_plain_has_no_form(body: dict[str, Any]) -> None:
    assert key_of(EMBEDDINGS_URL, body) is None


@pytest.mark.parametrize(
    "body",
    [
        {}, {"text_1": "a"}, PAIR | {"text_2": ["b", "c"]}, PAIR | {"text_1": {"content": []}},
        PAIR | {"text_1": ""}, PAIR | {"instruction": "c"}, PAIR | {"max_tokens_per_doc": 3},
        PAIR | {"data_1": "a", "data_2": "b"}, {"text_1": "a", "data_2": "b"},
        PAIR | {"text_1": "a" * (LONGEST + 1)},
    ],
)  # fmt: skip
def test_a_score_that_is_not_plain_has_no_form(body: dict[str, Any]) -> None:
    assert key_of(SCORE_URL, body) is None


def test_rerankings_have_no_forms() -> None:
    assert {*RERANK_URLS, *SCORE_URLS, EMBEDDINGS_URL} == set(POOLING_TYPES)
    for url in RERANK_URLS:
        assert key_of(url, {"query": "a", "documents": ["b"]}) is None


def test_a_text_in_a_list_of_one_is_that_text() -> None:
    assert texts_of({"input": ["a"]}) == texts_of({"input": "a"}) == ("a",)
    assert texts_of({"text_1": "a", "text_2": ["b"]}) == ("a", "b")
