"""Half an answer is no answer, a whole one is never thrown away: servers that answer oddly."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from kit.servers.scripted_answers import (
    HELLO,
    USAGE,
    WHOLE,
    Raw,
    answer,
    answered_by,
    at_once,
    chat,
    delta,
    sse,
    stream,
    text,
)

from contract.errors import EngineDead, RequestFailed, RequestRejected
from contract.openai.body import COMPLETION_URL, MESSAGES_URL, RESPONSES_URL
from contract.openai.pooling import EMBEDDINGS_URL
from worker.engine import EngineRequest

Json = dict[str, Any]


def completion(prompt: Any = "hello", **fields: Any) -> EngineRequest:
    return EngineRequest(COMPLETION_URL, {"prompt": prompt, **fields})


# -- half an answer is no answer ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "raw", "words"),
    [
        (completion(n=2), stream(text(0, "a", "stop"), done=False), "1 of 2 choices"),
        (completion(["a", "b"]), stream(text(0, "a", "stop"), done=False), "1 of 2 choices"),
        (completion([[1], [2]], n=2), stream(text(0, "a", "stop"), done=False), "1 of 4 choices"),
        (chat(n=2), stream(delta(0, "stop", content="a"), done=False), "1 of 2 choices"),
        (chat(tools=[{}]), at_once(WHOLE | {"choices": []}), "0 of 1 choices"),
        (chat(tools=[{}]), at_once(WHOLE | {"choices": None}), "0 of 1 choices"),
        (chat(), stream(delta(content="a", end="error")), "finish_reason `error`"),
        (chat(), stream(delta(content="a", end="null")), "ends early"),
        (chat(), stream(delta(content="a", end="")), "ends early"),
        (chat(), stream(delta(content="a"), USAGE), "ends early"),
        (chat(), at_once({"choices": [{"message": "a", "finish_reason": "stop"}]}), "be read"),
        (completion(), at_once({"choices": [{"finish_reason": "stop"}]}), "be read"),
        (chat(), sse(b": PROCESSING\n\n"), "ends early"),
        (chat(), sse(), "ends early"),
        (chat(), sse(b"data: [DONE]\n\n"), "0 of 1 choices"),
        (EngineRequest(EMBEDDINGS_URL, {"input": "a"}),
            Raw([b'{"data": [{"embedding": [NaN]}]}']), "cannot be read"),
        (chat(tools=[{}]), at_once({"choices": [{"message": {}, "finish_reason": None}]}), "early"),
        (chat(tools=[{}]), at_once({"choices": [{"message": {}, "finish_reason": "error",
            "error": {"code": 502, "message": "Provider gone"}}]}), "Provider gone"),
        (chat(), stream(delta(content="a"), {"choices": [{"index": 0, "delta": {},
            "finish_reason": "error", "error": {"message": "Provider gone"}}]}), "Provider gone"),
        (EngineRequest(EMBEDDINGS_URL, {"input": ["a", "b"]}),
            at_once({"data": [{"index": 0, "embedding": [1.0]}]}), "1 of 2 embeddings"),
        (EngineRequest(MESSAGES_URL, {"messages": [], "max_tokens": 1}),
            at_once({"type": "message", "content": [], "stop_reason": None}), "ends early"),
        (EngineRequest(RESPONSES_URL, {"input": "a"}),
            at_once({"object": "response", "output": [], "status": "in_progress"}), "in_progress"),
    ],
)  # fmt: skip
async def test_half_an_answer_is_none(request_: EngineRequest, raw: Raw, words: str) -> None:
    async with answered_by(lambda _: raw) as (server, engine):
        with pytest.raises((RequestFailed, EngineDead), match=words):
            await answer(engine, request_)
        assert len(server.bodies) > 1


async def test_a_stream_is_cut_that_ends_without_what_the_server_has_ended_streams_with() -> None:
    ends = iter([True, False, True])
    cut = [delta(role="assistant", content="hel"), delta(content="lo", end="stop")]

    def script(_: Json) -> Raw:
        return stream(*HELLO) if next(ends) else stream(*cut, done=False)

    async with answered_by(script) as (server, engine):
        await answer(engine)
        assert (await answer(engine))["usage"] == USAGE["usage"]
        assert len(server.bodies) == 3


async def test_the_first_stream_of_vllm_is_cut_too_if_its_end_is_missing() -> None:
    ends = iter([False, True])
    async with answered_by(lambda _: stream(*HELLO, done=next(ends)), vllm=True) as (
        server,
        engine,
    ):
        await answer(engine)
        assert len(server.bodies) == 2


async def test_a_server_that_leaves_off_done_is_believed_before_an_answer_is_thrown_away() -> None:
    done = [True]
    script = lambda _: stream(*HELLO, done=bool(done))  # noqa: E731
    async with answered_by(script, controls=True) as (server, engine):
        await answer(engine)
        done.clear()
        for _ in range(3):
            assert (await answer(engine))["choices"][0]["message"]["content"] == "hello"
        assert len(server.bodies) == 1 + 3 + 1  # and a control


async def test_a_server_that_never_says_done_is_believed() -> None:
    async with answered_by(lambda _: stream(*HELLO, done=False)) as (server, engine):
        for _ in range(3):
            await answer(engine)
        assert len(server.bodies) == 3


async def test_a_server_without_several_choices_is_not_paid_a_third_time() -> None:
    async with answered_by(lambda _: at_once(WHOLE)) as (server, engine):
        with pytest.raises(RequestRejected, match="1 of 3 choices") as caught:
            await answer(engine, chat(n=3))
        assert caught.value.field == "n"
        assert len(server.bodies) == 2
        await answer(engine)
        with pytest.raises(RequestRejected, match="1 of 2 choices") as caught:
            await answer(engine, completion(["a", "b"]))
        assert caught.value.field == "prompt"


# -- a whole one is never thrown away -------------------------------------------------------------


def lines(end: bytes, *chunks: Json, last: bytes | None = None) -> bytes:
    said = [b"data: " + orjson.dumps(chunk) for chunk in chunks] + [b"data: [DONE]"]
    return (end + end).join(said) + (end + end if last is None else last)


def raw_delta(content: bytes, end: bytes = b"null") -> bytes:
    return (
        b'data: {"id":"x","model":"m","choices":[{"index":0,"delta":{"content":"' + content
        + b'"},"finish_reason":' + end + b"}]}\n\n"
    )  # fmt: skip


LATE = "\U0001f600"


@pytest.mark.parametrize(
    ("raw", "content"),
    [
        (sse(raw_delta(rb"a\ud83d"), raw_delta(rb"\ude00b", b'"stop"')), f"a{LATE}b"),
        (sse(raw_delta(rb"a\ud83d"), raw_delta(rb"b", b'"stop"')), "a\ufffdb"),
        (sse(raw_delta(b"a\xf0\x9f"), raw_delta(b"\x98\x80b", b'"stop"')), f"a{LATE}b"),
        (sse(raw_delta(b"a\tb", b'"stop"')), "a\tb"),
        (sse(lines(b"\r", *HELLO)), "hello"),
        (sse(lines(b"\r\n", *HELLO)), "hello"),
        (sse(*(bytes([byte]) for byte in lines(b"\r\n", *HELLO))), "hello"),
        (sse(b"\xef\xbb\xbf" + lines(b"\n", *HELLO)), "hello"),
        (sse(lines(b"\n", *HELLO, last=b"")), "hello"),
        (sse(lines(b"\n", *HELLO).replace(b"data: [DONE]\n\n", b"").rstrip()), "hello"),
        (sse(b"data:\n\ndata\n\n" + lines(b"\n", *HELLO)), "hello"),
        (sse(lines(b"\n", *HELLO).replace(b'"choices":', b'"choices":\ndata: ')), "hello"),
        (sse(lines(b"\n", *HELLO).replace(b"\n\n", b"\n")), "hello"),
        (sse(b"\n", b": PROCESSING\n\n", b"id: 7\nretry: 9\n" + lines(b"\n", *HELLO)), "hello"),
        (Raw([lines(b"\n", *HELLO)], stays=True), "hello"),
        (Raw([lines(b"\n", *HELLO)], "text/plain"), "hello"),
        (Raw([lines(b"\n", *HELLO)], "application/json"), "hello"),
        (Raw([lines(b"\n", *HELLO)], status=201), "hello"),
        (at_once(WHOLE), "hello"),
        (Raw([orjson.dumps(WHOLE)]), "hello"),
        (Raw([b" ", b"\n ", b"\xef\xbb\xbf" + orjson.dumps(WHOLE)], "application/json"), "hello"),
        (stream(WHOLE), "hello"),
        (at_once(HELLO[0] | {"choices": [{"index": 0, "delta": {"content": "hello"},
            "finish_reason": "stop"}]}), "hello"),
        (stream(delta(content="hel"), {"choices": [{"delta": {"content": "lo"}, "index": None,
            "finish_reason": "stop"}]}), "hello"),
        (stream(*HELLO, {"choices": [{"index": 0, "delta": {}, "finish_reason": None}]}), "hello"),
    ],
)  # fmt: skip
async def test_a_whole_answer_is_read_however_it_is_written(raw: Raw, content: str) -> None:
    async with answered_by(lambda _: raw) as (server, engine):
        found = await answer(engine)
        assert found["choices"][0]["message"]["content"] == content
        assert found["choices"][0]["finish_reason"] == "stop"
        assert len(server.bodies) == 1


async def test_infinite_log_probabilities_are_the_lowest_that_openai_has() -> None:
    chunk = orjson.dumps(delta(content="a", end="stop"))
    logprobs = b'"logprobs":{"content":[{"token":"a","logprob":-Infinity,"top":NaN}]},"delta"'
    raw = sse(b"data: " + chunk.replace(b'"delta"', logprobs) + b"\n\n")
    async with answered_by(lambda _: raw) as (_, engine):
        (choice,) = (await answer(engine, chat(logprobs=True, top_logprobs=1)))["choices"]
        assert choice["logprobs"]["content"] == [{"token": "a", "logprob": -9999.0, "top": None}]


@pytest.mark.parametrize(
    ("usage", "kept", "counted"),
    [
        ("n/a", None, (0, 0)),
        ([1], None, (0, 0)),
        ({"prompt_tokens": "n/a", "completion_tokens": None},
            {"prompt_tokens": None, "completion_tokens": None}, (0, 0)),
        ({"prompt_tokens": 3.0, "completion_tokens": "2", "cost": {"total_cost": 0.5}},
            {"prompt_tokens": 3, "completion_tokens": 2, "cost": {"total_cost": 0.5}}, (3, 2)),
        ({"prompt_tokens": 1e300, "completion_tokens": -1, "prompt_tokens_details":
            {"cached_tokens": "1"}}, {"prompt_tokens": None, "completion_tokens": None,
            "prompt_tokens_details": {"cached_tokens": 1}}, (0, 0)),
    ],
)  # fmt: skip
async def test_an_odd_usage_costs_no_answer(
    usage: Any, kept: Any, counted: tuple[int, int]
) -> None:
    for raw in (
        stream(*HELLO[:2], {"choices": [], "usage": usage}),
        at_once(WHOLE | {"usage": usage}),
    ):
        async with answered_by(lambda _, raw=raw: raw) as (_, engine):
            done = await engine.generate(chat(), "r1")
            assert orjson.loads(done.body)["usage"] == kept
            assert (done.prompt_tokens, done.completion_tokens) == counted


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        ([{"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "so "}]}]},
          {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "on"}]}]},
          {"content": "hello "}, {"content": [{"type": "text", "text": "world"}]}],
         {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "so on"}]},
                      {"type": "text", "text": "hello world"}]}),
        ([{"content": [{"type": "text", "text": "a"}]}, {"content": "b"},
          {"content": [{"type": "reference", "reference_ids": [1]}]},
          {"content": [{"type": "reference", "reference_ids": [2]}]}],
         {"content": [{"type": "text", "text": "ab"}, {"type": "reference", "reference_ids": [1]},
                      {"type": "reference", "reference_ids": [2]}]}),
        ([{"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "a"}]},
          {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "b"}]},
          {"reasoning_details": [{"type": "reasoning.text", "index": 0, "signature": "s"}]},
          {"reasoning_details": [{"type": "reasoning.text", "index": 1, "text": "c"}]},
          {"content": "d"}],
         {"content": "d", "reasoning_details": [
             {"type": "reasoning.text", "index": 0, "text": "ab", "signature": "s"},
             {"type": "reasoning.text", "index": 1, "text": "c"}]}),
        ([{"audio": {"id": "a1", "transcript": "he", "data": "AA"}},
          {"audio": {"transcript": "llo", "data": "BB"}}, {"audio": {"expires_at": 9}}],
         {"content": None, "audio": {
             "id": "a1", "transcript": "hello", "data": "AABB", "expires_at": 9}}),
        ([{"function_call": {"name": "add", "arguments": '{"a"'}},
          {"function_call": {"arguments": ": 1}"}}],
         {"content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}),
        ([{"tool_calls": [{"index": 0, "id": "1", "function": {"name": "a", "arguments": "{}"}}]},
          {"tool_calls": [{"index": 0, "id": "2", "function": {"name": "b", "arguments": "{"}}]},
          {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}],
         {"content": None, "tool_calls": [
             {"id": "1", "function": {"name": "a", "arguments": "{}"}},
             {"id": "2", "function": {"name": "b", "arguments": "{}"}}]}),
        ([{"reasoning_content": "so"}, {"reasoning_content": " on"}],
         {"content": None, "reasoning_content": "so on"}),
        ([{"annotations": [{"type": "url_citation", "url_citation": {"url": "a"}}]},
          {"annotations": [{"type": "url_citation", "url_citation": {"url": "b"}}]},
          {"content": "c"}],
         {"content": "c", "annotations": [{"type": "url_citation", "url_citation": {"url": "a"}},
                                          {"type": "url_citation", "url_citation": {"url": "b"}}]}),
    ],
)  # fmt: skip
async def test_what_comes_in_pieces_is_joined(deltas: list[Json], message: Json) -> None:
    chunks = [delta(role="assistant"), *(delta(**each) for each in deltas), delta(end="stop")]
    async with answered_by(lambda _: stream(*chunks)) as (_, engine):
        assert (await answer(engine))["choices"][0]["message"] == {"role": "assistant"} | message


def beside(said: str, piece: str, end: str | None = None) -> Json:
    message = {"role": "assistant", "content": said}
    choice = {"index": 0, "finish_reason": end, "message": message,
              "delta": {"role": "assistant", "content": piece}}  # fmt: skip
    return {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice]}


@pytest.mark.parametrize(
    "chunks",
    [
        [beside("hel", "hel"), beside("hello", "lo"), beside("hello", "", "stop")],
        [beside("hello", "hello", "stop")],
        [beside("hello", "", "stop")],
    ],
)
async def test_a_message_beside_the_delta_says_nothing_more(chunks: list[Json]) -> None:
    async with answered_by(lambda _: stream(*chunks)) as (server, engine):
        (choice,) = (await answer(engine))["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hello"}
        assert "delta" not in choice
        assert len(server.bodies) == 1


async def test_azures_empty_names_at_the_end_take_no_name_away() -> None:
    late = {"id": "", "model": "", "object": "", "choices": [
        {"index": 0, "finish_reason": None, "content_filter_results": {}}]}  # fmt: skip
    async with answered_by(lambda _: stream(*HELLO, late)) as (_, engine):
        found = await answer(engine)
        assert (found["id"], found["model"], found["object"]) == ("x", "m", "chat.completion")
