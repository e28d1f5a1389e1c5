"""Bodies of messages, responses and token counts."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from contract.errors import RequestRejected
from contract.openai.body import (
    BODY_TYPES,
    COUNT_TOKENS_URL,
    LIMITS,
    MESSAGES_URL,
    RESPONSES_URL,
    TOKENIZE_URL,
    limits_tokens,
    min_body,
    text_is_answer,
)
from contract.openai.lines import check_body, parse_line
from contract.streaming import texts_of
from producer.submit.lines import dedupe_key
from worker.engine import EngineRequest
from worker.engine.simulated.engine import SimulatedEngine

MESSAGES = [{"role": "user", "content": "Hello"}]
#: By name: url, body, what the error says.
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "a message without a limit": (
        MESSAGES_URL, {"messages": MESSAGES}, "body.max_tokens: is missing; give a whole number"),
    "a message of no role": (
        MESSAGES_URL, {"max_tokens": 5, "messages": [{"content": "x"}]}, "role"),
    "no message": (MESSAGES_URL, {"max_tokens": 5, "messages": []}, "body.messages: is empty"),
    "a server of tools": (
        MESSAGES_URL, min_body(MESSAGES_URL) | {"mcp_servers": [{}]}, "give `tools`"),
    "a misspelt field": (
        MESSAGES_URL, min_body(MESSAGES_URL) | {"stop_sequence": ["x"]}, "stop_sequences"),
    "a stream": (MESSAGES_URL, min_body(MESSAGES_URL) | {"stream": True}, "cannot stream"),
    "no input": (RESPONSES_URL, {"instructions": "x"}, "body.input: is missing; give a text, or"),
    "an older response": (
        RESPONSES_URL, {"input": "x", "previous_response_id": "resp_1"}, "give all of it"),
    "a conversation": (RESPONSES_URL, {"input": "x", "conversation": "c"}, "give all of it"),
    "a stored response": (RESPONSES_URL, {"input": "x", "store": True}, "give false"),
    "a background": (RESPONSES_URL, {"input": "x", "background": True}, "answered once"),
    "a kept prompt": (RESPONSES_URL, {"input": "x", "prompt": {"id": "p"}}, "no prompts are kept"),
    "chat's limit": (RESPONSES_URL, {"input": "x", "max_tokens": 5}, "unknown to /v1/responses"),
    "neither text nor chat": (TOKENIZE_URL, {}, "give `prompt` (a text), or `messages`"),
    "both": (TOKENIZE_URL, {"prompt": "x", "messages": MESSAGES}, "not both"),
    "an answer's limit": (
        COUNT_TOKENS_URL, {"messages": MESSAGES, "max_tokens": 5}, "unknown to"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_in_words(name: str) -> None:
    url, body, words = BAD[name]
    with pytest.raises(RequestRejected) as caught:
        check_body(url, body)
    assert words in caught.value.message


@pytest.mark.parametrize("url", BODY_TYPES)
def test_the_smallest_body_is_taken_also_as_a_line(url: str) -> None:
    assert check_body(url, min_body(url)) == min_body(url)
    line = orjson.dumps({"custom_id": "a", "method": "POST", "url": url, "body": min_body(url)})
    request = parse_line(line)
    assert (request.url, orjson.loads(request.body)) == (url, min_body(url))
    assert request.limited == limits_tokens(url, min_body(url))
    assert request.limited == (url == MESSAGES_URL or url not in LIMITS)


def test_what_says_nothing_is_left_out() -> None:
    claude = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "service_tier": "auto"}
    assert check_body(MESSAGES_URL, min_body(MESSAGES_URL) | claude) == min_body(MESSAGES_URL)
    harmless = {"store": False, "background": False, "safety_identifier": "x", "stream": None}
    assert check_body(RESPONSES_URL, min_body(RESPONSES_URL) | harmless) == min_body(RESPONSES_URL)


def test_only_greedy_messages_and_responses_are_asked_once() -> None:
    for url in (MESSAGES_URL, RESPONSES_URL):
        body = min_body(url)
        assert dedupe_key(url, orjson.dumps(body)) is None
        assert dedupe_key(url, orjson.dumps(body | {"temperature": 0})) is not None


@pytest.mark.parametrize("url", LIMITS)
def test_a_text_is_told_while_it_is_written_unless_tools_are_offered(url: str) -> None:
    body = min_body(url)
    assert text_is_answer(url, body)
    assert not text_is_answer(url, body | {"tools": [{"name": "f"}]})
    without = {"tools": [{"name": "f"}], "tool_choice": {"type": "none"}}
    assert text_is_answer(url, body | without)


@pytest.mark.parametrize("url", LIMITS)
def test_the_simulated_engine_answers_in_each_form(url: str) -> None:
    engine = SimulatedEngine(1, 0.0)
    answer = asyncio.run(engine.generate(EngineRequest(url, min_body(url)), "r"))
    assert texts_of(orjson.loads(answer.body))[0].startswith("simulated ")
