"""What servers refuse, how they say that something went wrong, and how slowly they may answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from aiohttp import web
from kit.servers.scripted_answers import (
    HELLO,
    WHOLE,
    Raw,
    ScriptedServer,
    answer,
    answered_by,
    at_once,
    chat,
    delta,
    sse,
    stream,
)

from contract.errors import EngineDead, RequestFailed, RequestRejected
from contract.openai.body import RESPONSES_URL
from worker.engine import EngineRequest

Json = dict[str, Any]


# -- what a server does not take ------------------------------------------------------------------


def refusing(*fields: str, words: str = "") -> Any:
    def script(body: Json) -> Raw:
        for name in fields:
            if name in body:
                said = words or f"Unrecognized request argument supplied: {name}"
                return at_once({"error": {"message": said, "param": None}}, 400)
        return stream(*HELLO) if body.get("stream") else at_once(WHOLE)

    return script


@pytest.mark.parametrize("fields", [("stream_options",), ("stream_options", "stream"), ("stream",)])
async def test_a_field_of_ours_that_is_refused_is_left_out_from_then_on(
    fields: tuple[str, ...],
) -> None:
    async with answered_by(refusing(*fields)) as (server, engine):
        for _ in range(3):
            assert (await answer(engine))["choices"][0]["message"]["content"] == "hello"
        assert len(server.bodies) == 3 + len(fields)
        for body in server.bodies[-2:]:
            assert body.keys().isdisjoint(fields)
            assert ("stream" in body) == ("stream" not in fields)


async def test_a_refusal_of_a_field_of_ours_in_a_200_is_one_too() -> None:
    def script(body: Json) -> Raw:
        refused = {"message": "stream_options: not supported", "code": 400}
        return at_once({"error": refused}) if "stream_options" in body else stream(*HELLO)

    async with answered_by(script) as (server, engine):
        await answer(engine)
        await answer(engine)
        assert len(server.bodies) == 3


async def test_a_refusal_by_fastapi_is_told_from_one_that_quotes_what_was_sent() -> None:
    def script(body: Json) -> Raw:
        if body.get("temperature") == 2:  # what was sent is quoted, ours too
            told = {"loc": ["body", "temperature"], "msg": "too hot", "input": body}
            return at_once({"detail": [told]}, 422)
        if "stream_options" in body:
            told = {"loc": ["body", "stream_options"], "type": "extra_forbidden"}
            return at_once({"detail": [told]}, 422)
        return stream(*HELLO)

    async with answered_by(script) as (server, engine):
        with pytest.raises(RequestRejected, match="too hot"):
            await answer(engine, chat(temperature=2))
        assert len(server.bodies) == 1
        await answer(engine)
        assert len(server.bodies) == 3


async def test_what_only_one_request_may_not_stream_is_not_learned_of_the_server() -> None:
    def script(body: Json) -> Raw:
        if body.get("stream") and body.get("n") == 2:
            return at_once({"error": {"message": "n is not supported with streaming"}}, 400)
        if body.get("n") == 2:
            return at_once(WHOLE | {"choices": WHOLE["choices"] * 2})
        return stream(*HELLO)

    async with answered_by(script) as (server, engine):
        await answer(engine)
        assert len((await answer(engine, chat(n=2)))["choices"]) == 2
        await answer(engine)
        assert server.bodies[-1]["stream"]


async def test_a_refusal_that_goes_on_without_the_field_is_the_lines_own() -> None:
    words = "stream must not be used here"
    async with answered_by(refusing("messages", words=words)) as (server, engine):
        with pytest.raises(RequestRejected, match=words):
            await answer(engine)
        assert len(server.bodies) == 2
        with pytest.raises(RequestRejected, match=words):
            await answer(engine)
        assert server.bodies[-2]["stream"]  # nothing was learned


# -- the server's own words -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        at_once({"error": {"message": "Slow down, please", "code": 429}}),
        at_once({"error": {"message": "Slow down, please", "code": "rate_limit_exceeded"}}),
        at_once({"error": {"message": "Slow down, please", "type": "RateLimitError"}}),
        at_once({"error": "Rate limit exceeded. Slow down, please"}),
        at_once({"error": {"message": "Slow down, please", "status": "RESOURCE_EXHAUSTED"}}),
        at_once({"type": "error", "error": {"type": "rate_limit_error", "message": "Slow down"}}),
        at_once({"object": "error", "message": "Slow down", "code": "429"}),
        stream({"error": {"message": "Slow down", "code": "rate_limit_exceeded"}}),
        sse(b'event: error\ndata: {"message": "Slow down", "code": 429}\n\n'),
        sse(b"event: error\ndata: Rate limit reached: slow down\n\n"),
        sse(b"event: error\ndata: Rate limit reached: slow down"),
        sse(b"data: " + orjson.dumps(delta(content="a")) + b"\n\n"
            b'event: error\ndata: {"code":\ndata: 429}\n\n'),
    ],
)  # fmt: skip
async def test_a_rate_limit_in_a_200_is_one(raw: Raw) -> None:
    limited = iter([raw])
    async with answered_by(lambda _: next(limited, stream(*HELLO))) as (server, engine):
        began = time.monotonic()
        await answer(engine)
        assert time.monotonic() - began > 0.9  # it was left alone, not asked at once
        assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (at_once({"error": {"message": "No such field", "code": 400}}), "No such field"),
        (at_once({"error": {"message": "No such field", "type": "invalid_request_error"}}),
            "No such field"),
        (stream({"error": {"message": "No such field", "type": "BadRequestError", "code": 400}}),
            "No such field"),
        (sse(b'event: error\ndata: {"detail": "No such field", "code": "invalid_value"}\n\n'),
            "No such field"),
    ],
)  # fmt: skip
async def test_a_refusal_in_a_200_is_one(raw: Raw, words: str) -> None:
    async with answered_by(lambda _: raw) as (server, engine):
        with pytest.raises(RequestRejected, match=words):
            await answer(engine)
        assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (sse(b"event: error\ndata: the shard caught fire\n\n"), "the shard caught fire"),
        (sse(b'event: error\ndata: {"message": "caught fire"}\n\n'), "caught fire"),
        (sse(b"data: upstream connect error\n\n"), "upstream connect error"),
        (sse(b"data: upstream connect error"), "upstream connect error"),
        (Raw([b"upstream connect error"], "text/plain"), "upstream connect error"),
        (Raw([b"<html><h1>Sign in</h1>"], "text/html"), "Sign in"),
        (at_once({"error": {"message": "Provider returned error", "code": 502,
            "metadata": {"raw": "caught fire"}}}), "Provider returned error: caught fire"),
        (at_once({"error": {"message": {"text": "caught fire"}}}), "caught fire"),
        (at_once({"detail": [{"msg": "caught fire"}]}), "caught fire"),
        (at_once(["caught fire"]), "caught fire"),
        (sse(b'data: ["caught fire"]\n\n'), "caught fire"),
        (sse(b'data: {"choices": [{"index": 0, "delta": "caught fire"}]}\n\n'), "caught fire"),
    ],
)  # fmt: skip
async def test_what_went_wrong_is_told_in_the_servers_words(raw: Raw, words: str) -> None:
    async with answered_by(lambda _: raw) as (_, engine):
        with pytest.raises((RequestFailed, EngineDead), match=words):
            await answer(engine)


async def test_a_response_that_failed_is_no_answer() -> None:
    failed = {"object": "response", "status": "failed", "output": [],
              "error": {"code": "invalid_prompt", "message": "not this"}}  # fmt: skip
    async with answered_by(lambda _: at_once(failed)) as (_, engine):
        with pytest.raises(RequestRejected, match="not this"):
            await answer(engine, EngineRequest(RESPONSES_URL, {"input": "a"}))


# -- time ----------------------------------------------------------------------------------------


async def test_a_server_that_says_it_is_at_work_has_not_stalled() -> None:
    async def slow(self: ScriptedServer, request: web.Request, *_: Any) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(16):
            await response.write(b": PROCESSING\n\n" if body.get("stream") else b" ")
            await asyncio.sleep(0.2)
        raw = stream(*HELLO) if body.get("stream") else at_once(WHOLE)
        await response.write(b"".join(raw.pieces))
        return response

    async with answered_by(lambda _: at_once(WHOLE), stall_timeout_s=1.0) as (server, engine):
        server._respond = slow.__get__(server)  # type: ignore[method-assign]
        await answer(engine)
        await answer(engine, chat(tools=[{}]))


async def test_a_line_of_60_mb_is_read_in_its_length() -> None:
    size = 60 * 2**20
    line = b"data: " + orjson.dumps(delta(content="x" * size, end="stop")) + b"\n\n"
    pieces = [line[at : at + 65536] for at in range(0, len(line), 65536)]
    async with answered_by(lambda _: sse(*pieces)) as (_, engine):
        began = time.process_time()
        found = await answer(engine)
        assert len(found["choices"][0]["message"]["content"]) == size
        assert time.process_time() - began < 6
