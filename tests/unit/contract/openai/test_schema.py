"""Validation of input lines: every bad one names its code, its field and what to do."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest
from kit.commands.error_codes import error_codes

from contract.errors import RequestRejected
from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.openai.lines import parse_line

MESSAGES = [{"role": "user", "content": "Hello"}]


def batch_line(**changes: Any) -> dict[str, Any]:
    """Return a good OpenAI batch line, changed."""
    line = {"custom_id": "a", "method": "POST", "url": CHAT_URL, "body": {"messages": MESSAGES}}
    return line | changes


def chat(**fields: Any) -> dict[str, Any]:
    """Return a good short-form chat line with more fields."""
    return {"messages": MESSAGES, **fields}


def text(**fields: Any) -> dict[str, Any]:
    """Return a good short-form completion line with more fields."""
    return {"prompt": "Hello", **fields}


def pooling(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": "c", "method": "POST", "url": url, "body": body}


# what is wrong: (line, code, field, a part of the text)
BAD: dict[str, tuple[dict[str, Any] | bytes, str, str | None, str]] = {
    "no JSON": (b"hello", "invalid_json", None, "not valid JSON"),
    "cut JSON": (b'{"prompt": "x"', "invalid_json", None, "one JSON object per line"),
    "no UTF-8": (b'{"prompt": "\xff"}', "invalid_json", None, "UTF-8"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', "invalid_json", None, "not valid JSON"),
    "an array": (b"[1]", "invalid_json", None, "write {...} on each line"),
    "nested 100,000 deep": (b"[" * 100_000, "invalid_json", None, "not"),
    "an int beyond 64 bits": (
        b'{"prompt": "x", "seed": 99999999999999999999}', "invalid_request", "seed", "64 bits"),
    "no prompt": ({"max_tokens": 1}, "invalid_request", "prompt", "`messages` nor `prompt`"),
    "empty messages": ({"messages": []}, "invalid_request", "messages", "at least one message"),
    "messages of text": ({"messages": "Hi"}, "invalid_request", "messages", "at least one message"),
    "no role": ({"messages": [{"content": "x"}]}, "invalid_request", "messages[0].role", "missing"),
    "empty prompt": ({"prompt": ""}, "invalid_request", "prompt", "give a text"),
    "empty prompt list": ({"prompt": []}, "invalid_request", "prompt", "list"),
    "max_tokens 0": (chat(max_tokens=0), "invalid_request", "max_tokens", "at least 1"),
    "max_tokens -1": (text(max_tokens=-1), "invalid_request", "max_tokens", "at least 1"),
    "max_tokens of text": (chat(max_tokens="9"), "invalid_request", "max_tokens", "whole number"),
    "max_tokens 1.5": (chat(max_tokens=1.5), "invalid_request", "max_tokens", "whole number"),
    "temperature 3": (chat(temperature=3), "invalid_request", "temperature", "0 (greedy) to 2"),
    "temperature -1": (chat(temperature=-1), "invalid_request", "temperature", "from 0"),
    "temperature true": (chat(temperature=True), "invalid_request", "temperature", "a number"),
    "top_p 0": (chat(top_p=0), "invalid_request", "top_p", "above 0"),
    "n 0": (chat(n=0), "invalid_request", "n", "1 to 128"),
    "n 129": (chat(n=129), "invalid_request", "n", "1 to 128"),
    "an empty stop": (chat(stop=[""]), "invalid_request", "stop[0]", "none of them empty"),
    "a stop of numbers": (chat(stop=[1]), "invalid_request", "stop[0]", "list of texts"),
    "logprobs of chat": (chat(logprobs=3), "invalid_request", "logprobs", "give true or false"),
    "logprobs of text": (text(logprobs=True), "invalid_request", "logprobs",
                          "is true or false; give a whole number"),
    "logit_bias": (chat(logit_bias={"5": 200}), "invalid_request", "logit_bias[...]", "100"),
    "stream": (chat(stream=True), "invalid_request", "stream", "cannot stream; remove it"),
    "stream_options": (chat(stream_options={}), "invalid_request", "stream_options", "remove it"),
    "a misspelt field": (
        chat(max_token=5), "unknown_field", "max_token", "spelling (did you mean max_tokens?)"),
    "a field in another style": (
        chat(topLogprobs=5), "unknown_field", "topLogprobs", "did you mean top_logprobs?"),
    "a field like no other": (
        chat(zzz=5), "unknown_field", "zzz", "remove it or correct its spelling"),
    "a number too large": (
        chat(min_tokens=2**40), "invalid_request", "min_tokens",
        "is above 2147483647; give at most 2147483647"),
    "a number too small": (
        chat(top_k=-2), "invalid_request", "top_k", "is below -1; give at least -1"),
    "a penalty of 0": (
        chat(repetition_penalty=0), "invalid_request", "repetition_penalty",
        "is not above 0; give more than 0"),
    "a number with a fraction": (
        chat(top_k=0.5), "invalid_request", "top_k",
        "is a number with a fraction; give a whole number"),
    "an empty text": (
        chat(cache_salt=""), "invalid_request", "cache_salt", "is empty; give a text"),
    "a long text": (
        chat(cache_salt="x" * 1025), "invalid_request", "cache_salt",
        "has a length that is above 1024; give at most 1024 characters"),
    "a word that is none of those": (
        chat(truncation_side="up"), "invalid_request", "truncation_side",
        "is 'up'; give one of left, right"),
    "a text or an object": (
        chat(tool_choice=1), "invalid_request", "tool_choice",
        "is a number; give a text or an object"),
    "a chat field in a completion": (text(tools=[]), "unknown_field", "tools", COMPLETION_URL),
    "an unknown url": (
        batch_line(url="/v1/moderations"), "unknown_url", "url", "use one of /v1/chat/completions"),
    "embeddings of nothing": (
        pooling("/v1/embeddings"), "invalid_request", "body.input", "or `messages`"),
    "embeddings of numbers": (
        pooling("/v1/embeddings", input=5), "invalid_request", "body.input",
        "is a number; give `input`"),
    "embeddings as bytes": (
        pooling("/v1/embeddings", input="x", encoding_format="bytes"), "invalid_request",
        "body.encoding_format", "is 'bytes'; give one of float, base64"),
    "a chat field in embeddings": (
        pooling("/v1/embeddings", input="x", max_tokens=5), "unknown_field", "body.max_tokens",
        "unknown to /v1/embeddings"),
    "a score of one side": (
        pooling("/v1/score", queries="x"), "invalid_request", "body.documents",
        "`queries` and `items`"),
    "a rerank without a query": (
        pooling("/rerank", documents=["x"]), "invalid_request", "body.query", "is missing"),
    "no url": ({"body": {}}, "unknown_url", "url", "is missing; give one of /v1/chat/completions"),
    "a url of null": (batch_line(url=None), "unknown_url", "url", "is null; use one of"),
    "a url of a number": (batch_line(url=5), "unknown_url", "url", "is a number; use one of"),
    "a url of a list": (batch_line(url=[]), "unknown_url", "url", "is a list; use one of"),
    "GET": (batch_line(method="GET"), "unknown_url", "method", "'GET' is not served; write POST"),
    "a method of null": (batch_line(method=None), "unknown_url", "method", "null is not served"),
    "no body": ({"url": CHAT_URL}, "invalid_request", "body", "is missing; give the request's"),
    "a body of null": (batch_line(body=None), "invalid_request", "body", "is null; give"),
    "a body of text": (batch_line(body="x"), "invalid_request", "body", "is a text; give"),
    "a custom_id of an object": (batch_line(custom_id={}), "invalid_request", "custom_id",
                                 "is an object; give a text of 1 to 512"),
    "a field beside the body": (
        batch_line(max_tokens=5), "unknown_field", "max_tokens", "belong inside `body`"),
    "a bad field in the body": (
        batch_line(body=chat(n=0)), "invalid_request", "body.n", "1 to 128"),
    "a custom_id of a number": (chat(custom_id=5), "invalid_request", "custom_id",
                                "is a number; give a text of 1 to 512 characters, in quotes"),
    "an empty custom_id": (chat(custom_id=""), "invalid_request", "custom_id",
                           "has 0 characters; give a text of 1 to 512"),
    "a custom_id too long": (chat(custom_id="x" * 513), "invalid_request", "custom_id", "512"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_line_names_its_code_its_field_and_the_remedy(what: str) -> None:
    line, code, field, part = BAD[what]
    with pytest.raises(RequestRejected) as caught:
        parse_line(line if isinstance(line, bytes) else orjson.dumps(line))
    error = caught.value
    assert (error.code, error.field) == (code, field)
    assert part in error.message
    assert code in error_codes()
    if field:
        assert field.split("[")[0] in error.message


def test_a_rejected_line_keeps_the_custom_id_it_has() -> None:
    with pytest.raises(RequestRejected) as caught:
        parse_line(orjson.dumps(batch_line(custom_id="mine", body={"messages": []})))
    assert caught.value.custom_id == "mine"


GOOD = {
    "batch line": batch_line(),
    "batch completion": batch_line(url=COMPLETION_URL, body={"prompt": "x"}),
    "no method": {"url": CHAT_URL, "body": chat()},
    "short chat": chat(),
    "short completion": text(custom_id="x" * 512),
    "token ids": {"prompt": [1, 2, 3]},
    "many prompts": {"prompt": ["a", "b"]},
    "content parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    "limits": chat(max_tokens=1, temperature=2, top_p=1, n=128, seed=-(2**63), top_k=-1),
    "nulls": chat(max_tokens=None, temperature=None, stop=None, seed=None),
    "stream false": chat(stream=False),
    "embeddings": pooling("/v1/embeddings", input=["a", "b"], dimensions=8),
    "embeddings of token ids": pooling("/v1/embeddings", input=[[1, 2], [3]]),
    "embeddings of messages": pooling("/v1/embeddings", messages=chat()["messages"]),
    "a score": pooling("/v1/score", text_1="a", text_2=["b", "c"]),
    "a rerank": pooling("/rerank", query="a", documents=["b", {"content": []}], top_n=1),
    "a schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
    "tools": chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="auto"),
}


@pytest.mark.parametrize("what", GOOD)
def test_a_good_line_passes_with_its_body_unchanged(what: str) -> None:
    line = GOOD[what]
    request = parse_line(orjson.dumps(line))
    body = line.get("body", {k: v for k, v in line.items() if k != "custom_id"})
    assert orjson.loads(request.body) == body
    assert request.custom_id == line.get("custom_id")
    inferred = CHAT_URL if "messages" in body else COMPLETION_URL
    assert request.url == line.get("url", inferred)


def test_overrides_replace_what_the_line_says_and_are_checked_too() -> None:
    request = parse_line(orjson.dumps(chat(max_tokens=5)), {"max_tokens": 7})
    assert orjson.loads(request.body)["max_tokens"] == 7
    with pytest.raises(RequestRejected, match=re.escape("field body.max_tokens")):
        parse_line(orjson.dumps(batch_line()), {"max_tokens": 0})
