"""Events of streamed answers, and texts of requests that run again."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from contract.errors import RequestRejected
from contract.openai.body import CHAT_URL, COMPLETION_URL, MESSAGES_URL, RESPONSES_URL
from contract.results import result_line
from contract.streaming import Piece, texts_of
from gateway.batches.api.output_lines import openai_line
from gateway.http.errors import ApiError
from gateway.online.answer import SentText, StreamedAnswer
from gateway.online.events import DONE, EventWriter, complete_response_json, event_writer
from gateway.online.pending import Waiter
from gateway.online.request import OnlineRequest, StreamOptions, read
from gateway.redis.online import Push

USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def events(url: str, **options: bool) -> EventWriter:
    return event_writer(
        OnlineRequest(url, b"{}", "m", 0, StreamOptions(**options), 0, 0, True), "id"
    )


def told(raw: bytes) -> list[dict[str, Any]]:
    """Return the data of events."""
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line.startswith(b"data")]
    return [orjson.loads(line) for line in lines if line != b"[DONE]"]


def whole(made: EventWriter, body: dict[str, Any], sent: dict[int, str] | None = None) -> bytes:
    return b"".join(made.last(body, sent or {}))


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    choices = [
        {"index": n, "message": {"role": "assistant", **m}, "finish_reason": "stop"} | fields
        for n, m in enumerate(messages)
    ]
    return {"object": "chat.completion", "choices": choices, "usage": USAGE}


def piece(at: int, text: str, attempt: int = 1, choice: int = 0) -> Piece:
    return Piece("id", attempt, choice, at, text)


# -- texts ----------------------------------------------------------------------------


def test_pieces_make_up_the_text() -> None:
    texts = SentText()
    assert list(texts.take([piece(0, "ab"), piece(2, "c"), piece(0, "x", choice=1)])) == [
        (0, "abc"), (1, "x")
    ]  # fmt: skip
    assert list(texts.take([piece(3, "d")])) == [(0, "d")]


def test_a_piece_that_comes_twice_is_sent_once() -> None:
    texts = SentText()
    list(texts.take([piece(0, "abc")]))
    assert list(texts.take([piece(1, "bcd")])) == [(0, "d")]
    assert list(texts.take([piece(0, "abcd")])) == []


def test_after_a_missing_piece_the_text_waits_for_what_repairs_it() -> None:
    texts = SentText()
    list(texts.take([piece(0, "ab")]))
    assert list(texts.take([piece(5, "f")])) == []
    assert list(texts.take([piece(0, "abcdef")])) == [(0, "cdef")]


def test_a_request_that_runs_again_goes_on_where_its_text_is_the_same() -> None:
    texts = SentText()
    list(texts.take([piece(0, "abc")]))
    assert list(texts.take([piece(0, "ab", attempt=2)])) == []
    assert list(texts.take([piece(2, "cd", attempt=2)])) == [(0, "d")]
    assert list(texts.take([piece(4, "zz", attempt=1)])) == []
    assert texts.continued_by({0: "abcde"})


def test_another_text_of_a_second_attempt_is_not_sent_and_is_noticed() -> None:
    texts = SentText()
    list(texts.take([piece(0, "abc")]))
    assert list(texts.take([piece(0, "axcdef", attempt=2)])) == []
    assert not texts.continued_by({0: "axcdef"})


# -- chats and completions --------------------------------------------------------------


def test_each_choice_of_a_chat_has_its_role_first_and_its_end_last() -> None:
    made = events(CHAT_URL)
    raw = made.text(1, "b") + made.text(0, "a") + made.text(0, "c")
    chunks = told(raw + whole(made, chat({"content": "acd"}, {"content": "b"}), {0: "ac", 1: "b"}))
    deltas = [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in chunks]
    assert deltas == [
        (1, {"role": "assistant", "content": ""}), (1, {"content": "b"}),
        (0, {"role": "assistant", "content": ""}), (0, {"content": "a"}), (0, {"content": "c"}),
        (0, {"content": "d"}), (0, {}), (1, {}),
    ]  # fmt: skip
    assert all("usage" not in c for c in chunks)


def test_usage_comes_once_and_is_null_before() -> None:
    made = events(CHAT_URL, include_usage=True)
    *chunks, last = told(made.text(0, "a") + whole(made, chat({"content": "a"}), {0: "a"}))
    assert all(c["usage"] is None for c in chunks)
    assert (last["choices"], last["usage"]) == ([], USAGE)


def test_the_usage_of_each_chunk_is_told_as_soon_as_it_is_known() -> None:
    made = events(COMPLETION_URL, include_usage=True, continuous_usage_stats=True)
    body = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}], "usage": USAGE}
    assert [c["usage"] for c in told(whole(made, body))] == [None, USAGE, USAGE]


def test_tool_calls_and_reasoning_come_whole_in_one_delta() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"content": None, "reasoning": "hm", "tool_calls": [call], "refusal": None}
    first, delta, last = told(whole(events(CHAT_URL), chat(message, finish_reason="tool_calls")))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    expected = {"reasoning": "hm", "tool_calls": [{"index": 0, **call}]}
    assert delta["choices"][0]["delta"] == expected
    assert last["choices"][0]["finish_reason"] == "tool_calls"


def test_log_probabilities_come_with_the_text() -> None:
    logprobs = {"content": [{"token": "a", "logprob": -1}]}
    chunks = told(whole(events(CHAT_URL), chat({"content": "a"}, logprobs=logprobs)))
    assert [c["choices"][0]["logprobs"] for c in chunks] == [None, logprobs, None]


def test_an_empty_answer_has_a_role_and_an_end() -> None:
    chunks = told(whole(events(CHAT_URL), chat({"content": ""})))
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "stop"]


def test_a_stop_text_is_told_with_the_end() -> None:
    body = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop", "stop_reason": "."}]}
    assert told(whole(events(COMPLETION_URL), body))[-1]["choices"][0]["stop_reason"] == "."


def test_an_error_is_an_event_and_the_end_follows() -> None:
    raw = events(CHAT_URL).broken(ApiError(503, "away", code="c"))
    assert told(raw)[0]["error"]["message"] == "away"
    assert raw.endswith(DONE)


# -- Anthropic's and OpenAI's other streams -----------------------------------------------


def test_blocks_of_a_message_are_numbered_and_closed() -> None:
    made = events(MESSAGES_URL)
    body = {
        "type": "message", "stop_reason": "tool_use", "usage": {"output_tokens": 5},
        "content": [
            {"type": "text", "text": "Hi you"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ],
    }  # fmt: skip
    data = told(made.text(0, "Hi") + whole(made, body, {0: "Hi"}))
    kinds = [(d["type"], d.get("index")) for d in data]
    assert kinds == [
        ("message_start", None), ("content_block_start", 0), ("content_block_delta", 0),
        ("content_block_delta", 0), ("content_block_stop", 0), ("content_block_start", 1),
        ("content_block_delta", 1), ("content_block_stop", 1), ("message_delta", None),
        ("message_stop", None),
    ]  # fmt: skip
    assert data[6]["delta"] == {"type": "input_json_delta", "partial_json": '{"a":1}'}
    assert data[-2]["delta"]["stop_reason"] == "tool_use"


def test_events_of_a_response_are_numbered_and_speak_of_one_item() -> None:
    made = events(RESPONSES_URL)
    part = {"type": "output_text", "text": "abc", "annotations": []}
    item = {"type": "message", "id": "vllms", "role": "assistant", "content": [part]}
    body = {"object": "response", "id": "vllms", "status": "completed", "output": [item]}
    data = told(made.text(0, "ab") + whole(made, body, {0: "ab"}))
    assert [d["sequence_number"] for d in data] == list(range(len(data)))
    assert {d["item_id"] for d in data if "item_id" in d} == {"msg_id"}
    assert data[-1]["response"]["output"][0]["id"] == "msg_id"
    assert data[0]["response"]["id"] == data[-1]["response"]["id"] == "resp_id"
    deltas = [d["delta"] for d in data if d["type"] == "response.output_text.delta"]
    assert "".join(deltas) == texts_of(body)[0]


def test_a_call_in_a_response_comes_with_its_arguments() -> None:
    call = {"type": "function_call", "id": "fc", "name": "f", "arguments": "{}"}
    body = {"object": "response", "status": "incomplete", "output": [call]}
    kinds = [d["type"].removeprefix("response.") for d in told(whole(events(RESPONSES_URL), body))]
    assert kinds == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "incomplete",
    ]  # fmt: skip


# -- bodies -----------------------------------------------------------------------------

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def asked(highest: int = 0, **fields: Any) -> OnlineRequest:
    return read(CHAT_URL, orjson.dumps(HELLO | fields), highest)


def test_a_body_without_anything_for_the_gateway_is_passed_on_byte_for_byte() -> None:
    raw = b' {"messages": [{"role":"user","content":"\\u0041"}], "temperature": 1.0}'
    assert read(CHAT_URL, raw, 0).body == raw


@pytest.mark.parametrize(
    ("fields", "highest", "priority"),
    [
        ({}, 0, 0), ({}, 3, 3), ({"priority": 6}, 0, 6), ({"priority": -5}, 0, 0),
        ({"priority": 2**40}, 0, 9), ({"priority": 1}, 6, 6), ({"service_tier": "flex"}, 0, 3),
        ({"service_tier": "auto"}, 0, 0), ({"service_tier": "flex", "priority": 9}, 0, 9),
    ],
)  # fmt: skip
def test_priorities_are_the_queues_and_bounded_by_the_key(
    fields: dict[str, Any], highest: int, priority: int
) -> None:
    found = asked(highest, **fields)
    assert found.priority == priority
    assert b"priority" not in found.body and b"service_tier" not in found.body


def test_tokens_are_estimated_from_what_the_body_says() -> None:
    few, many = asked(max_tokens=1), asked(max_tokens=101, n=2)
    assert 0 < few.tokens < 40
    assert many.tokens - few.tokens == pytest.approx(201, abs=4)


def test_what_streams_says_so_and_the_engine_is_not_told() -> None:
    found = asked(stream=True, stream_options={"include_usage": True, "include_obfuscation": 1})
    assert found.stream == StreamOptions(include_usage=True)
    assert b"stream" not in found.body
    assert asked(stream=False).stream is None


def test_an_embedding_cannot_be_streamed() -> None:
    with pytest.raises(ApiError, match="no streamed answers"):
        read("/v1/embeddings", b'{"input":"x","stream":true}', 0)


def test_a_field_of_the_wrong_type_is_named() -> None:
    with pytest.raises(RequestRejected) as caught:
        asked(priority="high")
    assert caught.value.field == "priority"


# -- answers of other programs --------------------------------------------------------

STRANGE = [
    b"7", b"[]", b'{"choices":7}', b'{"choices":["x"]}', b'{"choices":[{"message":7,"text":[]}]}',
    b'{"type":"message","content":7}', b'{"type":"message","content":["x"]}',
    b'{"object":"response","output":7}', b'{"object":"response","output":[7],"usage":7}',
    b'{"object":"response","output":[{"type":"message","content":[7]}]}',
    b'{"choices":[{"message":{"a":' + b"[" * 300 + b"]" * 300 + b"}}]}",
]  # fmt: skip


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETION_URL, MESSAGES_URL, RESPONSES_URL])
@pytest.mark.parametrize("begun", [False, True])
async def test_an_answer_of_another_program_ends_a_stream_as_an_answer_or_in_words(
    url: str, begun: bool
) -> None:
    for body in STRANGE:
        meta = b'{"status":"SUCCESS","result":' + body + b',"warmq":{"timing":{}}}'
        waiter = Waiter(Push("l", "id", None, b""), listens=True)
        waiter.ending.set_result(meta)
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        asked = OnlineRequest(url, b"{}", "m", 0, StreamOptions(), 0, 0, True)
        stream = StreamedAnswer(asked, waiter, send, {})
        if begun:
            await stream._write([b": begun"])
        try:
            await stream.run(60)
        except ApiError as error:
            assert (error.status, begun) == (500, False)
        else:
            assert sent[-1]["more_body"] is False


def test_an_answer_of_another_program_is_passed_on_as_it_is() -> None:
    for body in STRANGE:
        orjson.loads(complete_response_json(body))
        meta = b'{"status":"SUCCESS","result":' + body + b',"warmq":{"timing":{}}}'
        line = result_line("t0", "c7", 7, meta)
        assert orjson.loads(openai_line(line))["custom_id"] == "c7"
