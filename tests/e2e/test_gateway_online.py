"""Online answers of the real engine through the gateway, streamed and in one piece, as the SDK
reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.real_stack import Stack

from demo.stack import Worker

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("worker")]
SAY: Any = [{"role": "user", "content": "What is 2 + 3?"}]
LONG: Any = {"max_tokens": 600, "seed": 7, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(
    stack: Stack, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    with (
        GatewayProcess(stack.url, folder) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as made,
    ):
        yield made


def test_a_streamed_chat_says_what_the_whole_one_says(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=SAY, n=2, **LONG)
    options: Any = {"include_usage": True}
    *chunks, last = client.chat.completions.create(
        model=model, messages=SAY, n=2, stream=True, stream_options=options, **LONG
    )
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {c.index: c.message.content for c in whole.choices}
    assert sum(bool(c.choices[0].delta.content) for c in chunks) > 2  # one came piece by piece
    ends = {c.choices[0].index: c.choices[0].finish_reason for c in chunks[-4:]}
    assert ends == {0: "length", 1: "length"}
    assert last.usage and whole.usage
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 1200


def test_a_streamed_completion_of_several_prompts_says_what_the_whole_one_says(
    client: openai.OpenAI,
) -> None:
    asked: Any = {"model": "tiny", "prompt": ["2 + 3 =", "a b"], "n": 2, **LONG}
    whole = client.completions.create(**asked)
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {c.index: c.text for c in whole.choices}


def test_log_probabilities_and_echo_come_with_a_streamed_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "2 + 3 =", "echo": True, "logprobs": 1, **LONG}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(stream=True, **asked))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert whole.choices[0].text.startswith("2 + 3 =")
    told = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [t.tokens for t in told if t] == [whole.choices[0].logprobs.tokens]  # type: ignore[union-attr]


def test_what_does_not_fit_is_the_clients_mistake_also_streamed(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "word " * 3000}], stream=stream
            )
        assert caught.value.code == "context_length_exceeded"


def test_the_models_path_on_the_workers_machine_is_not_told(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list().data] == ["tiny"]


def test_tokens_messages_and_responses_are_answered(client: openai.OpenAI) -> None:
    root = str(client.base_url).removesuffix("/v1/")
    tokens = httpx.post(f"{root}/tokenize", json={"model": "tiny", "prompt": "2 + 3 ="}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 2
    body = {"model": "tiny", "max_tokens": 50, "messages": SAY}
    assert httpx.post(f"{root}/v1/messages", json=body).json()["type"] == "message"
    asked: Any = {"model": "tiny", "input": "What is 2 + 3?", "max_output_tokens": 50,
                  "temperature": 0}  # fmt: skip
    with client.responses.stream(**asked) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    assert client.responses.create(**asked).output_text == text
