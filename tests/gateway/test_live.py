"""Online requests through a real gateway and a real worker with the simulated engine."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from kit.gateways.live_stack import HELLO, MODEL, Stack

from demo.stack import eventually


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("live"), gateway_models="org/later") as made:
        yield made


def test_a_chat_is_answered(stack: Stack) -> None:
    answer = stack.client.chat.completions.create(model=MODEL, messages=HELLO)
    assert (answer.choices[0].message.content or "").startswith("simulated ")
    assert answer.usage and answer.usage.total_tokens == 2
    assert str(answer._request_id).startswith("req_")


async def test_many_chats_at_once_are_answered_each_with_its_own(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=stack.url, api_key="none", max_retries=0) as client:

        async def ask(text: str) -> str:
            messages = [{"role": "user", "content": text}]
            answer = await client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[call-overload]
            return str(answer.choices[0].message.content)

        answers = await asyncio.gather(*(ask(f"question {n}") for n in range(100)))
    assert answers == [stack.text_of(f"question {n}") for n in range(100)]


def test_a_completion_is_answered_and_its_raw_response_has_the_headers(stack: Stack) -> None:
    raw = stack.client.completions.with_raw_response.create(model=MODEL, prompt=[1, 2, 3])
    assert raw.parse().choices[0].text.startswith("simulated ")
    assert raw.headers["content-type"] == "application/json"
    assert int(raw.headers["openai-processing-ms"]) >= 0


def test_a_streamed_chat_has_role_text_and_end(stack: Stack) -> None:
    chunks = list(stack.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == stack.text_of("Hello")
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_a_stream_has_its_usage_where_it_is_asked_for(stack: Stack) -> None:
    stream = stack.client.completions.create(
        model=MODEL, prompt="x", stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(c.choices[0].text for c in chunks).startswith("simulated ")
    assert all(c.usage is None for c in chunks)
    assert last.choices == [] and last.usage and last.usage.total_tokens == 2


def test_a_request_whose_answer_is_not_text_alone_is_streamed_whole(stack: Stack) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    stream = stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, tools=[tool]  # type: ignore[list-item]
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == stack.text_of("Hello")
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, "stop"]


def test_a_stream_ends_as_the_sse_of_openai_does(stack: Stack) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    answer = httpx.post(f"{stack.url}/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.text.endswith("\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"messages": []}, 400, "messages", "invalid_request"),
        ({"temperature": 9}, 400, "temperature", "invalid_request"),
        ({"nonsense": 1}, 400, "nonsense", "unknown_field"),
        ({"stream": "yes"}, 400, "stream", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": 3}, 400, "stream_options", "invalid_value"),
        ({"functions": []}, 400, "functions", "invalid_request"),
        ({"priority": "high"}, 400, "priority", "invalid_request"),
        ({"model": "smal"}, 404, "model", "model_not_found"),
        ({"model": 7}, 400, "model", "invalid_request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_told_with_status_field_and_code(
    stack: Stack, fields: dict[str, object], status: int, param: str | None, code: str, stream: bool
) -> None:
    if stream and not fields.keys() & {"stream", "stream_options"}:
        fields = fields | {"stream": True}
    body = {"model": MODEL, "messages": HELLO} | fields
    answer = httpx.post(f"{stack.url}/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert error.keys() == {"message", "type", "param", "code"}


def test_a_failed_attempt_is_told_and_may_be_retried(stack: Stack) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        stack.client.chat.completions.create(model=MODEL, messages=HELLO, user="simulate:fail")
    assert (caught.value.status_code, caught.value.code) == (503, "request_failed")
    assert caught.value.response.headers["retry-after"] == "1"


def test_a_failure_after_the_first_text_is_an_event_of_the_stream(stack: Stack) -> None:
    stream = stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, user="simulate:fail=1", stream=True
    )
    assert next(stream).choices[0].delta.role == "assistant"
    with pytest.raises(openai.APIError, match="simulated failure") as caught:
        list(stream)
    assert caught.value.code == "request_failed"


def test_the_first_text_is_streamed_while_the_request_runs(stack: Stack) -> None:
    stream = stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, user="simulate:sleep=3", stream=True
    )
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert stack.running() == 1
    assert chunk.choices[0].delta.content == "simulated "
    rest = "".join(c.choices[0].delta.content or "" for c in stream)
    assert "simulated " + rest == stack.text_of("Hello")


def test_an_unknown_model_is_told_what_is_served_and_not_to_retry(stack: Stack) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        stack.client.chat.completions.create(model="smal", messages=HELLO)
    assert "did you mean small?" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"a":' + b"[" * 2000])
def test_a_body_that_is_no_json_object_is_refused(stack: Stack, raw: bytes) -> None:
    answer = httpx.post(f"{stack.url}/chat/completions", content=raw)
    assert answer.status_code == 400
    assert "line" not in answer.json()["error"]["message"]


def test_an_endpoint_that_the_model_has_not_is_refused(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError):
        stack.client.embeddings.create(model=MODEL, input="x")


def test_without_a_model_the_only_one_is_asked(stack: Stack) -> None:
    answer = httpx.post(f"{stack.url}/chat/completions", json={"messages": HELLO})
    assert answer.status_code == 200


def test_models_are_listed_also_those_to_come(stack: Stack) -> None:
    listed = stack.client.models.list().data
    assert [m.id for m in listed] == ["org/later", MODEL]
    assert {m.object for m in listed} == {"model"}
    assert stack.client.models.retrieve("org/later").id == "org/later"
    with pytest.raises(openai.NotFoundError):
        stack.client.models.retrieve("nothing")


def test_a_caller_who_hangs_up_frees_the_slot(stack: Stack) -> None:
    for stream in (False, True):
        sockets = [stack.begin("simulate:sleep=50", stream=stream) for _ in range(4)]
        eventually(lambda: stack.running() == 4, 10, "all slots are taken")
        for sock in sockets:
            sock.close()
        began = time.monotonic()
        stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert time.monotonic() - began < 20  # not 50
        eventually(lambda: stack.running() == 0, 10, "no slot is taken")


def test_a_caller_who_hangs_up_while_its_request_waits_costs_no_slot(stack: Stack) -> None:
    started, revoked = stack.started(), len(stack.revoked())
    holding = [stack.begin("simulate:sleep=50") for _ in range(4)]
    eventually(lambda: stack.started() == started + 4, 10, "all slots are taken")
    waiting = [stack.begin("simulate:sleep=40") for _ in range(3)]
    eventually(lambda: stack.waiting() == 3, 10, "three wait")
    for sock in waiting:
        sock.close()
    eventually(lambda: len(stack.revoked()) == revoked + 3, 10, "they are cancelled")
    for sock in holding:
        sock.close()
    stack.client.chat.completions.create(model=MODEL, messages=HELLO)
    assert stack.started() == started + 5


def test_priorities_of_requests_become_the_queues(stack: Stack) -> None:
    sockets = [stack.begin("simulate:sleep=50") for _ in range(4)]
    eventually(lambda: stack.running() == 4, 10, "all slots are taken")
    more = [
        stack.begin("simulate:sleep=1", **fields)
        for fields in ({"service_tier": "flex"}, {"priority": 9}, {"priority": -3}, {})
    ]
    eventually(lambda: stack.waiting() == 4, 10, "four wait")
    assert stack.waiting_by_step() == {"0": 2, "3": 1, "9": 1}
    for sock in (*sockets, *more):
        sock.close()
    eventually(lambda: stack.running() == 0 and stack.waiting() == 0, 10, "nothing is left")


def test_a_restart_of_redis_loses_no_answer(stack: Stack) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(
                stack.client.chat.completions.create,
                model=MODEL, user="simulate:sleep=2", stream=number % 2 == 0,
                messages=[{"role": "user", "content": str(number)}],
            )
            for number in range(8)
        ]  # fmt: skip
        eventually(lambda: stack.running() == 4, 10, "requests run")
        stack.redis.stop()
        stack.redis.start()
        for number, answer in enumerate(answers):
            assert stack.said(answer.result()) == stack.text_of(str(number))


def test_a_half_sent_body_is_no_request(stack: Stack) -> None:
    started = stack.started()
    with socket.create_connection(("127.0.0.1", stack.gateway.port)) as sock:
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99\r\n\r\n{"
        )
    stack.client.chat.completions.create(model=MODEL, messages=HELLO)
    assert stack.started() == started + 1
    assert "Traceback" not in Path(stack.gateway.log_path).read_text()


def test_a_message_of_anthropics_is_answered_and_streamed(stack: Stack) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": HELLO}
    answer = httpx.post(f"{stack.url}/messages", json=body).json()
    assert answer["content"][0]["text"] == stack.text_of("Hello")
    body |= {"stream": True}
    events = [
        orjson.loads(line.removeprefix("data: "))
        for line in httpx.post(f"{stack.url}/messages", json=body).text.splitlines()
        if line.startswith("data: ")
    ]
    assert [e["type"] for e in events if e["type"] != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(deltas) == stack.text_of("Hello")
    assert events[-2]["usage"] == answer["usage"]


def test_a_message_that_is_wrong_is_told_as_anthropic_does(stack: Stack) -> None:
    answer = httpx.post(f"{stack.url}/messages", json={"model": MODEL, "messages": HELLO})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_response_is_answered_and_streamed(stack: Stack) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Hello"}
    whole = stack.client.responses.create(**asked)
    assert whole.output_text.startswith("simulated ")
    with stack.client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
