"""What of the gateway names paths, beside the routes themselves; what a client whose base URL lacks
/v1 is told, and a request that a gateway which ends has not answered."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from gateway.app import HANDLERS, RequestContext, _answer_http_error, routes
from gateway.http.audit import ID_IN_PATH
from gateway.http.errors import ApiError, error_response
from gateway.http.idempotency import ONLINE_BODY_TYPES
from gateway.online import endpoint as live


def test_all_online_requests_attach_to_their_first_try_and_nothing_else_does() -> None:
    posts = {r.path for r in live.routes() if "POST" in (r.methods or ())}
    assert posts == set(ONLINE_BODY_TYPES)
    assert {"/v1/score", "/v1/rerank", "/v1/messages/count_tokens"} <= set(ONLINE_BODY_TYPES)


def test_audit_finds_ids_in_the_paths_of_routes_alone() -> None:
    kinds = ID_IN_PATH.pattern.partition("(?:")[2].partition(")")[0].split("|")
    paths = [route.path for route in routes()]
    for kind in kinds:
        assert any(path.startswith(f"/v1/{kind}/{{") for path in paths), kind


def test_errors_of_anthropics_paths_have_anthropics_types() -> None:
    kinds = {
        400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
        404: "not_found_error", 409: "conflict_error", 413: "request_too_large",
        429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 507: "api_error",
    }  # fmt: skip
    for status, kind in kinds.items():
        answer = error_response({"path": "/v1/messages"}, ApiError(status, "no"))
        assert f'"type":"{kind}"'.encode() in answer.body


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("GET", "/batches", "but /v1/batches: end the client's base URL with /v1"),
        ("GET", "/other", "docs/reference/gateway.md"),
        ("GET", "/v1/v1/batches", "docs/reference/gateway.md"),
    ],
)
async def test_the_route_that_was_meant_is_named(method: str, path: str, told: str) -> None:
    async def route(_: Any) -> Any:
        raise NotImplementedError

    app = Starlette(routes=[Route("/v1/batches", route)])
    scope = {"type": "http", "method": method, "path": path, "headers": [], "app": app}
    scope |= {"query_string": b"", "root_path": "", "server": ("h", 80), "scheme": "http"}
    response = await _answer_http_error(Request(scope), HTTPException(404))
    assert told in bytes(response.body).decode()


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

    serving = asyncio.create_task(RequestContext(inner)(dict(SCOPE), receive, send))
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
