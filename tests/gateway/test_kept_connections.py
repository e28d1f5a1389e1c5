"""An error does not reset the next request of a client that keeps its connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from kit.gateways.gateway_process import GatewayProcess, free_port
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually
from gateway.app import HANDLERS, RequestContext
from gateway.http.connections import protocol_for
from gateway.redis.api_keys import ApiKeys


async def _fails(request: Request) -> Response:
    await request.body()
    raise RuntimeError("nobody has foreseen it")


async def _fails_unread(_: Request) -> Response:
    raise RuntimeError("nobody has foreseen it")


async def _breaks(_: Request) -> Response:
    async def pieces() -> Any:
        yield b"begun"
        raise RuntimeError("in the middle")

    return StreamingResponse(pieces())


async def _well(request: Request) -> Response:
    client = request.client
    assert client is not None
    return PlainTextResponse(str(client.port))


@pytest.fixture
def url() -> Iterator[str]:
    """Return the URL of a server in this process, as the gateway is made, whose routes fail."""
    app = Starlette(
        routes=[
            Route("/fails", _fails, methods=["POST"]),
            Route("/fails-unread", _fails_unread, methods=["POST"]),
            Route("/breaks", _breaks), Route("/well", _well),
        ],
        exception_handlers=HANDLERS, middleware=[Middleware(RequestContext)],
    )  # fmt: skip
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(
        app, port=port, loop="uvloop", http=protocol_for(100), ws="none", log_level="critical",
        lifespan="off", timeout_graceful_shutdown=1,
    ))  # fmt: skip
    thread = threading.Thread(target=server.run)
    thread.start()
    eventually(lambda: server.started, 20, "the server listens")
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("path", ["/fails", "/fails-unread"])
@pytest.mark.parametrize("size", [10, 5_000_000])
def test_after_a_500_the_same_connection_goes_on(url: str, path: str, size: int) -> None:
    with httpx.Client(base_url=url, timeout=20) as client:
        before = client.get("/well").text
        for _ in range(5):
            failed = client.post(path, content=b"x" * size)
            assert failed.status_code == 500
            assert failed.json()["error"]["code"] == "internal_error"
            assert len(failed.headers.get_list("x-request-id")) == 1
            assert "close" not in failed.headers.get("connection", "")
            assert client.get("/well").text == before


def test_an_answer_that_breaks_off_ends_its_connection(url: str) -> None:
    with httpx.Client(base_url=url, timeout=20) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            client.get("/breaks")
        assert client.get("/well").status_code == 200


def test_what_is_refused_before_its_body_was_read_resets_nothing(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path / "redis").start()
    key = ApiKeys.using(BatchStore(redis.client(), ttl_ms=60_000)).create("a")[0]
    good = {"authorization": f"Bearer {key}"}
    try:
        with (
            GatewayProcess(redis.url, tmp_path, max_line_bytes=500_000) as running,
            httpx.Client(base_url=running.url, timeout=20) as client,
        ):
            for path, headers, size, status in (
                ("/v1/chat/completions", {}, 900_000, 401),
                ("/v1/no/such", good, 900_000, 404),
                ("/v1/chat/completions", good, 3_000_000, 413),
                ("/v1/chat/completions", good, 9_000_000, 413),
                ("/v1/files", {}, 3_000_000, 401),
                ("/v1/models", good, 900_000, 405),
            ):
                told = client.post(path, headers=headers, content=b"x" * size)
                assert told.status_code == status, (path, told.text)
                assert client.get("/v1/models", headers=good).status_code == 200
    finally:
        redis.stop()
