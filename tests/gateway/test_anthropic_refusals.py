"""What is refused before any route is reached has Anthropic's envelope on Anthropic's paths."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from kit.gateways.gateway_process import GatewayProcess, few, free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from demo.stack import RedisServer, eventually
from gateway.app import HANDLERS, RequestContext
from gateway.http import bodies, connections
from gateway.http.bodies import BodyMemoryLimit, BodySizeLimit, Budget
from gateway.http.connections import FRAMING_BYTES, HEAD_BYTES, Connection, Guard

BODY = 2**20
#: Of the fixture `gateway`.
GATEWAY_SETTINGS = {"max_line_bytes": BODY // 2}
#: What a request is for, as raw bytes: each has all of Anthropic's clients' paths in front.
PATHS = (b"/v1/messages", b"/v1/messages/count_tokens", b"/v1/messages/batches",
         b"/v1/messages/batches/msgbatch_1?limit=1", b"/v1/mess%61ges/batches",
         b"http://127.0.0.1/v1/messages")  # fmt: skip
HOST = b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = HOST + b"Transfer-Encoding: chunked\r\n"
INVALID = "invalid_request_error"
#: By name: the method; what follows the path; the status and Anthropic's type for it.
REFUSED = {
    "a huge header": (b"POST", HOST + b"X: " + b"a" * (HEAD_BYTES + 1), 431, INVALID),
    "many headers": (b"POST", HOST + b"X: aaaaaaaa\r\n" * 9000 + b"\r\n", 431, INVALID),
    "a huge query": (b"GET", b"?a=" + b"a" * 2 * HEAD_BYTES, 431, INVALID),
    "huge trailers": (
        b"POST", CHUNKED + b"\r\n0\r\nX: " + b"a" * 20 * FRAMING_BYTES, 431, INVALID),
    "a header that is none": (b"POST", HOST + b"Bad Header: x\r\n\r\n", 400, INVALID),
    "no chunk": (b"POST", CHUNKED + b"\r\nzz\r\n", 400, INVALID),
    "two lengths": (
        b"POST", HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, INVALID),
    "another version": (b"POST", b" HTTP/9.9\r\n\r\n", 400, INVALID),
    "two keys": (b"GET", HOST + b"X-Api-Key: a\r\nX-Api-Key: b\r\n\r\n", 400, INVALID),
    "two kinds of key": (
        b"GET", HOST + b"X-Api-Key: a\r\nAuthorization: Bearer b\r\n\r\n", 400, INVALID),
    "another name": (b"GET", b" HTTP/1.1\r\nHost: a.example\r\n\r\n", 401, "authentication_error"),
    "a method of no route": (b"PUT", HOST + b"\r\n", 405, INVALID),
    "no route": (b"GET", b"/a/b/c" + HOST + b"\r\n", 404, "not_found_error"),
    "control characters": (b"GET", b"/%07" + HOST + b"\r\n", 404, "not_found_error"),
}  # fmt: skip
SLOW = {
    "a slow head": (b"POST", HOST + b"X: ", 408, INVALID),
    "a slow body": (b"POST", HOST + b"Content-Length: 10\r\n\r\n", 408, INVALID),
    "a body slower than its budget": (
        b"POST", HOST + b"Content-Length: 99999\r\n\r\n" + b"a" * 2000, 408, INVALID),
    "more bodies than the budget": (
        b"POST", HOST + b"Content-Length: 99999\r\n\r\n" + b"a" * 99_999, 503, "overloaded_error"),
}  # fmt: skip
TOO_LARGE = {
    "a large body": (b"Content-Length: %d\r\n\r\n" % (2 * BODY) + b"a" * 2 * BODY),
    "a huge body": b"Content-Length: 99999999999\r\n\r\n",
    "large chunks": b"Transfer-Encoding: chunked\r\n\r\n"
    + (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 32 + b"0\r\n\r\n",
}  # fmt: skip


def refusal(port: int, sent: bytes) -> tuple[int, str]:
    """Send a request; return the status, and the type that Anthropic's client reads."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(sent)
        while not whole(got) and (part := client.recv(65536)):
            got += part
    head, _, body = got.partition(b"\r\n\r\n")
    told = json.loads(body)
    assert set(told) == {"type", "error", "request_id"}, told
    assert told["type"] == "error"
    assert set(told["error"]) == {"type", "message"}
    assert told["error"]["message"]
    assert f"\r\nrequest-id: {told['request_id']}".encode() in head
    return int(head.split()[1]), told["error"]["type"]


def whole(got: bytes) -> bool:
    head, _, body = got.partition(b"\r\n\r\n")
    length = head.partition(b"content-length: ")[2].split(b"\r\n")[0]
    return bool(length) and len(body) >= int(length)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_outside_all_routes_is_anthropics(
    gateway: GatewayProcess, path: bytes, name: str
) -> None:
    method, rest, status, kind = REFUSED[name]
    if b"?" in path and not rest.startswith(b" "):
        path = path.partition(b"?")[0]
    assert refusal(gateway.port, method + b" " + path + rest) == (status, kind)


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/messages/count_tokens"])
def test_a_body_that_is_too_large_is_refused_in_anthropics_words(
    gateway: GatewayProcess, path: bytes, name: str
) -> None:
    sent = b"POST " + path + HOST + TOO_LARGE[name]
    assert refusal(gateway.port, sent) == (413, "request_too_large")


def test_too_many_connections_are_told_in_anthropics_words(
    redis_server: RedisServer, gateway: GatewayProcess
) -> None:
    with (
        GatewayProcess(redis_server.url, gateway.log_path.parent, descriptors=few(1)) as small,
        socket.create_connection(("127.0.0.1", small.port)),
    ):
        told = refusal(small.port, b"POST /v1/messages" + HOST + b"\r\n")
    assert told == (503, "overloaded_error")


# -- time: uvicorn in this process, with bounds of a second --------------------------


async def _echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture(scope="module")
def impatient() -> Iterator[uvicorn.Server]:
    """Return a server with the gateway's middlewares that has a second, and little memory."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HEAD_S", "BODY_S"):
            patch.setattr(connections, name, 1.0)
        for name, value in (("SMALL", 1000), ("PIECE_S", 0.5)):
            patch.setattr(bodies, name, value)
        patch.setattr(bodies, "Budget", lambda _: Budget(2000))
        paths = ("/v1/messages", "/v1/messages/batches", "/v1/messages/count_tokens")
        app = Starlette(
            routes=[Route(path, _echo, methods=["POST"]) for path in paths],
            exception_handlers=HANDLERS,
        )
        app.add_middleware(BodyMemoryLimit, most=BODY, longest_line=90_000)
        app.add_middleware(BodySizeLimit, most=BODY)
        app.add_middleware(RequestContext)
        server = uvicorn.Server(uvicorn.Config(
            app, port=free_port(), loop="uvloop", ws="none", log_level="critical", lifespan="off",
            http=type("C", (Connection,), {"guard": Guard(100)}), timeout_graceful_shutdown=1,
        ))  # fmt: skip
        thread = threading.Thread(target=server.run)
        thread.start()
        eventually(lambda: server.started, 20, "the server listens")
        yield server
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/messages/batches"])
def test_a_slow_request_is_refused_in_anthropics_words(
    impatient: uvicorn.Server, path: bytes, name: str
) -> None:
    method, rest, status, kind = SLOW[name]
    assert refusal(impatient.config.port, method + b" " + path + rest) == (status, kind)


def test_a_gateway_that_stops_says_so_in_anthropics_words(
    impatient: uvicorn.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of its server, which is stopped here."""
    monkeypatch.setattr(connections, "BODY_S", 60.0)
    answers: list[tuple[int, str]] = []
    half = b"POST /v1/messages" + HOST + b"Content-Length: 10\r\n\r\na"
    asking = threading.Thread(target=lambda: answers.append(refusal(impatient.config.port, half)))
    asking.start()
    eventually(lambda: bool(impatient.server_state.tasks), 10, "it is being served")
    impatient.should_exit = True
    asking.join(20)
    assert answers == [(503, "overloaded_error")]
