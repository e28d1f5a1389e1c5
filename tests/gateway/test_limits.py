"""Limits of online requests, batches and files, and how the SDK understands their errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from contract.redis.batches import BatchStore
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, json_error
from gateway.http.limits import Limits, check_model, estimated_tokens, go_duration
from gateway.redis.limits import Budgets, Rates


@pytest.fixture
async def limits(redis_url: str, store: BatchStore) -> AsyncIterator[Limits]:
    rates = Rates.open(redis_url, "test")
    yield Limits(rates, Budgets.using(store))
    await rates.close()


async def test_a_key_without_limits_asks_redis_nothing() -> None:
    nowhere: Any = Limits(Rates.open("redis://127.0.0.1:1/0", "test"), Budgets.__new__(Budgets))
    assert await nowhere.check_online(Caller(key_id="k"), 10**9) == {}
    nowhere.correct(Caller(key_id="k"), 0)


async def test_an_allowed_request_gets_headers_with_what_is_left(limits: Limits) -> None:
    caller = Caller(key_id="k", requests_per_minute=60, tokens_per_minute=6000)
    assert await limits.check_online(caller, 100) == {
        "x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000", "x-ratelimit-remaining-tokens": "5900",
        "x-ratelimit-reset-tokens": "1s",
    }  # fmt: skip


async def test_headers_state_only_what_is_limited(limits: Limits) -> None:
    headers = await limits.check_online(Caller(key_id="k", requests_per_minute=2), 10**9)
    assert set(headers) == {
        f"x-ratelimit-{word}-requests" for word in ("limit", "remaining", "reset")
    }


async def test_a_request_is_corrected_to_what_it_used(limits: Limits) -> None:
    caller = Caller(key_id="k", tokens_per_minute=1000)
    await limits.check_online(caller, 1000)
    with pytest.raises(ApiError):
        await limits.check_online(caller, 500)
    limits.correct(caller, 10 - 1000)
    headers = await limits.check_online(caller, 500)
    assert int(headers["x-ratelimit-remaining-tokens"]) in range(485, 500)


async def test_an_error_states_what_was_asked_what_is_left_and_when_to_retry(
    limits: Limits,
) -> None:
    caller = Caller(key_id="k", requests_per_minute=60, tokens_per_minute=600)
    await limits.check_online(caller, 590)
    with pytest.raises(ApiError) as raised:
        await limits.check_online(caller, 100)
    error = raised.value
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert "59 of 60 requests" in error.message
    assert "10 of 600 tokens (asked: about 100)" in error.message
    assert "try again in" in error.message
    assert error.headers["retry-after"] in ("9", "10")
    assert 8_000 < int(error.headers["retry-after-ms"]) <= 9_000
    assert error.headers["x-ratelimit-remaining-tokens"] == "10"
    assert "x-should-retry" not in error.headers


async def test_what_never_fits_is_not_to_be_tried_again(limits: Limits) -> None:
    with pytest.raises(ApiError) as raised:
        await limits.check_online(Caller(key_id="k", tokens_per_minute=50), 51)
    assert raised.value.headers["x-should-retry"] == "false"
    assert "51 tokens" in raised.value.message


async def test_many_at_once_get_exactly_what_there_is(limits: Limits) -> None:
    caller = Caller(key_id="k", requests_per_minute=50)
    found = await asyncio.gather(
        *(limits.check_online(caller, 1) for _ in range(300)), return_exceptions=True
    )
    assert sum(not isinstance(each, ApiError) for each in found) == 50


async def test_the_sdk_waits_as_headers_ask_and_goes_on(limits: Limits) -> None:
    caller = Caller(key_id="k", requests_per_minute=120)  # one comes back in half a second

    async def serve(_: Request) -> Response:
        try:
            headers = await limits.check_online(caller, 1)
        except ApiError as error:
            return json_error(error)
        return JSONResponse({"ok": True}, headers=headers)

    app = Starlette(routes=[Route("/v1/x", serve)])
    inside = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    for _ in range(120):
        await limits.check_online(caller, 1)
    client = openai.AsyncOpenAI(base_url="http://in/v1", api_key="k", http_client=inside)  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await client.get("/x", cast_to=object)
    assert 0.3 < loop.time() - began < 5
    with pytest.raises(openai.RateLimitError) as raised:
        await client.with_options(max_retries=0).get("/x", cast_to=object)
    assert raised.value.type == "rate_limit_exceeded"
    await inside.aclose()


def test_a_batch_above_the_budget_is_refused_for_good(limits: Limits) -> None:
    caller = Caller(tenant="t", enqueued_tokens=100)
    limits.reserve(caller, "b1", {"m": 70})
    limits.reserve(caller, "b1", {"m": 70})
    with pytest.raises(ApiError) as raised:
        limits.reserve(caller, "b2", {"m": 40})
    error = raised.value
    assert (error.status, error.code, error.type) == (
        429,
        "insufficient_quota",
        "insufficient_quota",
    )
    assert error.headers == {"x-should-retry": "false"}
    assert "about 40 tokens of model m" in error.message
    assert "30 of 100 are left" in error.message
    limits.reserve(caller, "b2", {"n": 40})  # another model
    limits.give_back("b1")
    limits.reserve(caller, "b3", {"m": 100})


def test_without_a_limit_batches_are_counted_for_those_who_have_one(limits: Limits) -> None:
    limits.reserve(Caller(tenant="t"), "b1", {"m": 10**9})
    with pytest.raises(ApiError):
        limits.reserve(Caller(tenant="t", enqueued_tokens=10), "b2", {"m": 1})


def test_files_are_bounded_together(limits: Limits) -> None:
    caller = Caller(tenant="t", file_bytes=100)
    limits.check_bytes(caller, 100)
    limits.check_and_count_bytes(caller, "file-1", 80)
    with pytest.raises(ApiError, match="the file has 30 bytes, and 20 of 100 are left"):
        limits.check_bytes(caller, 30)
    with pytest.raises(ApiError) as raised:
        limits.check_and_count_bytes(caller, "file-2", 30)
    assert raised.value.headers["x-should-retry"] == "false"
    limits.forget_bytes("t", "file-1")
    limits.check_and_count_bytes(caller, "file-2", 30)


def test_a_key_for_some_models_is_for_these_alone() -> None:
    caller = Caller(models=frozenset(("a", "b")))
    check_model(caller, "a")
    check_model(Caller(), "anything")
    with pytest.raises(ApiError, match="'c'; it may use a, b") as raised:
        check_model(caller, "c")
    assert raised.value.status == 403


@pytest.mark.parametrize(("ms", "text"), [
    (0, "0ms"), (12, "12ms"), (999, "999ms"), (1000, "1s"), (1500, "1.5s"), (59_999, "59.999s"),
    (60_000, "1m0s"), (360_000, "6m0s"), (3_600_000, "1h0m0s"), (3_723_004, "1h2m3.004s"),
])  # fmt: skip
def test_durations_are_written_as_go_writes_them(ms: int, text: str) -> None:
    assert go_duration(ms) == text


def test_tokens_are_estimated_from_bytes() -> None:
    assert [estimated_tokens(size) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]
