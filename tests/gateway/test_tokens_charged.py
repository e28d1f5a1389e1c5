"""Tokens that were made are charged, also to who hangs up before the end."""

from __future__ import annotations

import socket
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
    with Stack(tmp_path_factory.mktemp("charged"), gateway_online_timeout_s=2) as made:
        yield made


@pytest.fixture
def key(stack: Stack) -> str:
    return ApiKeys.using(stack.store).create("t", tokens_per_minute=600)[0]


def chat(stack: Stack, key: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": HELLO} | fields
    return httpx.post(
        f"{stack.url}/chat/completions", json=body, timeout=20,
        headers={"authorization": f"Bearer {key}"},
    )  # fmt: skip


def left(response: httpx.Response) -> int:
    return int(response.headers["x-ratelimit-remaining-tokens"])


def hang_up(stack: Stack, key: str, **fields: Any) -> int:
    """Stream a chat, leave after its first text, and return what was left when it began."""
    body = {"model": MODEL, "messages": HELLO, "stream": True, "user": "simulate:sleep=30"}
    with httpx.stream(
        "POST", f"{stack.url}/chat/completions", json=body | fields, timeout=20,
        headers={"authorization": f"Bearer {key}"},
    ) as answer:  # fmt: skip
        if answer.status_code == 200:
            for data in answer.iter_text():
                if "simulated" in data:
                    break
        return left(answer) if answer.status_code == 200 else -1


def test_whoever_hangs_up_each_time_is_refused_in_the_end(stack: Stack, key: str) -> None:
    for _ in range(40):
        if hang_up(stack, key, max_tokens=100) < 0:
            return
    raise AssertionError("forty streams of a hundred tokens, and 600 a minute")


def test_the_text_that_was_written_is_charged_and_not_all_that_could_be(
    stack: Stack, key: str
) -> None:
    first = hang_up(stack, key, max_tokens=400)
    assert first < 200  # the estimate is held while it is written

    def settled() -> int:
        return left(chat(stack, key, max_tokens=1))

    now = eventually(lambda: (found := settled()) > 450 and found, 20, "the rest is given back")
    assert now < 600 - 25  # the prompt, and ten bytes of text


def test_a_chat_that_is_given_up_in_time_is_charged(stack: Stack, key: str) -> None:
    late = chat(stack, key, user="simulate:sleep=50", max_tokens=300)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "request_timeout")
    told = chat(stack, key, max_tokens=1)
    assert 400 < left(told) < 600 - 25  # two prompts, and ten bytes; some comes back each second


def test_a_whole_answer_that_nobody_can_hear_of_is_charged_as_it_may_be(
    stack: Stack, key: str
) -> None:
    began = time.monotonic()
    body = {"model": MODEL, "messages": HELLO, "user": "simulate:sleep=30"}
    whole = httpx.URL(stack.url).copy_with(path="/v1/chat/completions")
    request = httpx.Request(
        "POST", whole, json=body | {"max_tokens": 300, "logprobs": True},
        headers={"authorization": f"Bearer {key}"},
    )  # fmt: skip
    head = b"".join(b"%s: %s\r\n" % pair for pair in request.headers.raw)
    with socket.create_connection((whole.host, whole.port or 80)) as client:
        client.sendall(b"POST %s HTTP/1.1\r\n%s\r\n%s" % (whole.raw_path, head, request.content))
        eventually(lambda: stack.running() == 1, 20, "it runs")
    eventually(lambda: stack.running() == 0, 20, "it is cancelled")
    back = (time.monotonic() - began) * 10 + 1  # 600 a minute
    assert left(chat(stack, key, max_tokens=1)) < 300 + back


def test_what_is_refused_costs_nothing_and_what_ends_costs_its_usage(
    stack: Stack, key: str
) -> None:
    client = openai.OpenAI(base_url=stack.url, api_key=key, max_retries=0)
    wrong = chat(stack, key, url="/v1/embeddings", max_tokens=-1)
    assert wrong.status_code == 400
    refused = client.with_raw_response
    with pytest.raises(openai.APIStatusError):  # the engine has no answer for it
        refused.embeddings.create(model=MODEL, input="x" * 800)
    done = chat(stack, key, max_tokens=400)
    used = done.json()["usage"]["total_tokens"]
    again = chat(stack, key, max_tokens=1)
    estimate = -(-len(again.request.content) // 4) + 1
    assert 600 - used - estimate - 1 <= left(again) <= 600 - used - estimate + 40
