"""What a gateway that ends tells the requests it has not answered."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import orjson
import pytest

from gateway.app import HANDLERS, EveryAnswer

SCOPE = {"type": "http", "path": "/v1/files", "headers": []}


async def ended_while(app: Any) -> list[dict[str, Any]]:
    """Cancel a request as uvicorn does when its patience is over; return what was sent."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    reached = asyncio.Event()

    async def inner(_: Any, __: Any, send: Any) -> None:
        await app(send)
        reached.set()
        await asyncio.Event().wait()

    serving = asyncio.create_task(EveryAnswer(inner)(dict(SCOPE), receive, send))
    await reached.wait()
    serving.cancel("Task cancelled, timeout graceful shutdown exceeded")
    await serving
    return sent


def test_a_request_that_is_cancelled_anywhere_is_told_that_the_gateway_stops() -> None:
    async def nothing_yet(_: Any) -> None: ...

    start, body = asyncio.run(ended_while(nothing_yet))
    assert start["status"] == 503
    assert orjson.loads(body["body"])["error"]["code"] == "gateway_stops"
    assert any(name == b"x-request-id" for name, _ in start["headers"])


def test_an_answer_that_has_begun_gets_no_second_head() -> None:
    async def begins(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ended_while(begins))


def test_errors_are_answered_without_a_thread() -> None:
    """When a gateway ends, its loop does not wait for one, and all may be busy."""
    assert all(inspect.iscoroutinefunction(handler) for handler in HANDLERS.values())
