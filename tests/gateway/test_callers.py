"""Callers with keys, through a real gateway and a real worker: limits, models, retries."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from kit.gateways.live_stack import HELLO, MODEL, Stack

from demo.stack import eventually
from gateway.redis.api_keys import ApiKeys


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("callers")) as made:
        ApiKeys.using(made.store).create("somebody")
        eventually(lambda: refused(made), 10, "the gateway knows that there are keys")
        yield made


def refused(stack: Stack) -> bool:
    try:
        stack.client.models.list()
    except openai.AuthenticationError:
        return True
    return False


def client_for(stack: Stack, tenant: str = "t", **limits: Any) -> openai.OpenAI:
    secret, _ = ApiKeys.using(stack.store).create(tenant, **limits)
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
    keys = ApiKeys.using(stack.store)
    secret, key = keys.create("t")
    with openai.OpenAI(base_url=stack.url, api_key=secret, max_retries=0) as client:
        assert chat(client)
        keys.revoke(key.id)
        time.sleep(1)  # what is promised
        with pytest.raises(openai.AuthenticationError):
            chat(client)


@pytest.mark.parametrize("stream", [True, False])
def test_what_runs_for_a_revoked_key_ends_within_seconds(stack: Stack, stream: bool) -> None:
    keys = ApiKeys.using(stack.store)
    secret, key = keys.create("t")
    kept, other_key = keys.create("t")
    started, given_up = stack.started(), len(stack.revoked())
    body = {"model": MODEL, "messages": HELLO, "user": "simulate:sleep=50", "stream": stream}
    found: dict[str, httpx.Response] = {}

    def ask(name: str, secret: str) -> None:
        headers = {"authorization": f"Bearer {secret}"}
        url = f"{stack.url}/chat/completions"
        found[name] = httpx.post(url, json=body, headers=headers, timeout=40)

    asking = threading.Thread(target=ask, args=("revoked", secret))
    other = threading.Thread(target=ask, args=("kept", kept))
    asking.start()
    other.start()
    eventually(lambda: stack.started() == started + 2, 10, "both run")
    keys.revoke(key.id)
    asking.join(10)
    if not stream:  # a stream that has begun ends with an error event
        assert found["revoked"].status_code == 401
    assert "was revoked" in found["revoked"].text
    eventually(lambda: len(stack.revoked()) == given_up + 1, 10, "its request is cancelled")
    assert "kept" not in found
    keys.revoke(other_key.id)
    other.join(10)
    assert "was revoked" in found["kept"].text


def test_a_stream_that_has_begun_ends_with_an_error_when_its_key_is_revoked(stack: Stack) -> None:
    keys = ApiKeys.using(stack.store)
    secret, key = keys.create("t")
    body = {"model": MODEL, "messages": HELLO, "user": "simulate:sleep=50", "stream": True}
    headers = {"authorization": f"Bearer {secret}"}
    url = f"{stack.url}/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=40) as answer:
        lines = answer.iter_lines()
        assert answer.status_code == 200  # the first sign of life has come
        keys.revoke(key.id)
        rest = "".join(lines)
    assert "invalid_api_key" in rest
    assert "was revoked" in rest
