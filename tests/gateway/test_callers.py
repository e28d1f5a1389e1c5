"""Callers with keys, through a real gateway and a real worker: limits, models, retries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_stack import HELLO, MODEL, Stack

from contract.redis.gateway.api_keys import ApiKeys
from demo.stack import eventually


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("callers")) as made:
        ApiKeys.beside(made.store).create("somebody")
        eventually(lambda: refused(made), 10, "the gateway knows that there are keys")
        yield made


def refused(stack: Stack) -> bool:
    try:
        stack.client.models.list()
    except openai.AuthenticationError:
        return True
    return False


def client_for(stack: Stack, tenant: str = "t", **limits: Any) -> openai.OpenAI:
    secret, _ = ApiKeys.beside(stack.store).create(tenant, **limits)
    return openai.OpenAI(base_url=stack.url, api_key=secret, max_retries=0, timeout=30)


def chat(client: openai.OpenAI, **more: Any) -> Any:
    more = {"max_tokens": 10, "messages": HELLO} | more
    return client.chat.completions.with_raw_response.create(model=MODEL, **more)


def test_a_limited_key_is_told_what_is_left_and_then_refused(stack: Stack) -> None:
    client = client_for(stack, requests_per_minute=2)
    assert [chat(client).headers["x-ratelimit-remaining-requests"] for _ in "12"] == ["1", "0"]
    with pytest.raises(openai.RateLimitError) as raised:
        chat(client)
    assert raised.value.code == "rate_limit_exceeded"
    assert 20 < float(raised.value.response.headers["retry-after"]) <= 31
    assert raised.value.response.headers["x-request-id"]
    other = client_for(stack)  # of the same tenant, without limits
    assert "x-ratelimit-limit-requests" not in chat(other).headers


def test_tokens_are_corrected_to_what_the_answer_used(stack: Stack) -> None:
    client = client_for(stack, tokens_per_minute=600)
    for _ in range(5):  # each asks for more than half of the minute, and uses 2
        told = chat(client, max_tokens=400)
    assert int(told.headers["x-ratelimit-remaining-tokens"]) < 200
    streamed = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=500, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    assert list(streamed)[-1].usage
    assert chat(client, max_tokens=500)
    with pytest.raises(openai.RateLimitError) as raised:
        chat(client, max_tokens=700)
    assert raised.value.response.headers["x-should-retry"] == "false"


def test_a_key_for_other_models_does_not_get_this_one(stack: Stack) -> None:
    client = client_for(stack, models=("other",))
    with pytest.raises((openai.PermissionDeniedError, openai.NotFoundError)):
        chat(client)
    assert MODEL not in [model.id for model in client.models.list()]


def test_a_retry_of_a_chat_is_answered_and_computed_once(stack: Stack) -> None:
    client, key = client_for(stack), {"Idempotency-Key": "chat-1"}
    messages = [{"role": "user", "content": "only once"}]
    first = chat(client, messages=messages, extra_headers=key)
    again = chat(client, messages=messages, extra_headers=key)
    assert again.text == first.text
    assert again.headers["idempotent-replayed"] == "true"
    with pytest.raises(openai.ConflictError):
        chat(client, extra_headers=key)
    # Another tenant's same key is another request.
    foreign = chat(client_for(stack, "u"), messages=messages, extra_headers=key)
    assert "idempotent-replayed" not in foreign.headers


def test_a_revoked_key_ends_within_a_second(stack: Stack) -> None:
    keys = ApiKeys.beside(stack.store)
    secret, key = keys.create("t")
    with openai.OpenAI(base_url=stack.url, api_key=secret, max_retries=0) as client:
        assert chat(client)
        keys.revoke(key.id)
        time.sleep(1)  # what is promised
        with pytest.raises(openai.AuthenticationError):
            chat(client)
