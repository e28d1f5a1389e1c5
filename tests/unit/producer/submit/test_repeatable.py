"""What `submit --dedupe` takes for the same question."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.naming import request_id
from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.openai.lines import Request
from contract.openai.pooling import EMBEDDINGS_URL
from producer.submit.lines import Leaders, dedupe_key

GREEDY: dict[str, Any] = {"prompt": "Hi", "temperature": 0}


def key(body: dict[str, Any], url: str = COMPLETION_URL) -> bytes | None:
    return dedupe_key(url, orjson.dumps(body))


def chat_with(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}], "temperature": 0}


def test_a_greedy_request_is_repeatable_and_one_that_samples_is_not():
    assert key(GREEDY) is not None
    assert key(GREEDY | {"temperature": 0.0}) is not None
    assert key({"prompt": "Hi"}) is None
    assert key(GREEDY | {"temperature": None}) is None
    assert key(GREEDY | {"temperature": 0.01}) is None
    assert key({"prompt": "Hi", "temperature": 1, "seed": 7}) is None


@pytest.mark.parametrize(
    "field",
    [
        {"n": 2}, {"use_beam_search": True}, {"watermarking": True}, {"vllm_xargs": {"a": 1}},
        {"kv_transfer_params": {"remote": 1}}, {"ec_transfer_params": {}},
    ],
)  # fmt: skip
def test_what_makes_an_answer_depend_on_more_than_the_body_is_not_repeatable(field: dict[str, Any]):
    assert key(GREEDY | field) is None


@pytest.mark.parametrize(
    "field", [{"n": 1}, {"seed": 7}, {"top_p": 0.5}, {"use_beam_search": False}, {"n": None}]
)
def test_what_changes_nothing_about_a_greedy_answer_is_repeatable(field: dict[str, Any]):
    assert key(GREEDY | field) is not None


@pytest.mark.parametrize(
    "field", [{"user": "me"}, {"session_id": "s"}, {"priority": 3}, {"stream": False}]
)
def test_who_asks_and_how_urgent_it_is_are_no_part_of_the_question(field: dict[str, Any]):
    assert key(GREEDY | field) == key(GREEDY)


@pytest.mark.parametrize(
    "field", [{"model": "m"}, {"max_tokens": 9}, {"cache_salt": "s"}, {"prompt": "Hi "}]
)
def test_every_other_field_is_a_part_of_it(field: dict[str, Any]):
    assert key(GREEDY | field) not in (None, key(GREEDY))


def test_the_endpoint_is_a_part_of_it():
    chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    assert key(chat, CHAT_URL) not in (None, key(chat, COMPLETION_URL))


def test_the_order_of_the_fields_does_not_count_and_that_inside_of_a_schema_does():
    assert key(dict(reversed(GREEDY.items()))) == key(GREEDY)
    schema = {"a": {"type": "string"}, "b": {"type": "string"}}
    one, other = (
        GREEDY | {"structured_outputs": {"json": {"properties": properties}}}
        for properties in (schema, dict(reversed(schema.items())))
    )
    assert key(one) != key(other)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image_url", "image_url": "https://example.com/a.png"},
        {"type": "video_url", "video_url": {"url": "file:///a.mp4"}},
        {"type": "image_url", "image_url": None, "uuid": "seen before"},
    ],
)
def test_media_by_address_are_not_repeatable(part: dict[str, Any]):
    assert key(chat_with(part), CHAT_URL) is None


def test_media_by_content_are_and_so_is_a_text_that_speaks_of_addresses():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert key(chat_with(image), CHAT_URL) is not None
    text = {"type": "text", "text": '{"image_url": "https://example.com"}'}
    assert key(chat_with(text), CHAT_URL) is not None


def test_embeddings_are_repeatable_without_a_temperature():
    body = {"input": "Hi"}
    assert key(body, EMBEDDINGS_URL) == key(body | {"user": "me"}, EMBEDDINGS_URL) is not None


def test_the_first_line_of_a_question_leads_in_memory_and_on_disk():
    def asked(n: int) -> Request:
        return Request(None, COMPLETION_URL, orjson.dumps(GREEDY | {"max_tokens": n + 1}), True)

    with closing(Leaders(in_memory=40)) as leaders:
        for line in range(100):
            assert leaders.of(asked(line), request_id("b", str(line))) == ""
        for line in range(100):
            later = leaders.of(asked(line), request_id("b", f"later {line}"))
            assert later == request_id("b", str(line))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=9), VALUES), st.randoms(use_true_random=False))
def test_bodies_have_one_key_if_and_only_if_they_have_the_same_fields(fields, random):
    body = fields | GREEDY
    shuffled = list(body.items())
    random.shuffle(shuffled)
    assert key(dict(shuffled)) == key(body)
    if key(body) is not None:
        assert key(body | {"prompt": "another"}) != key(body)
        assert key(body | {"logit_bias": {"1": 2}, "max_tokens": 99}) != key(body)
