"""Clients that are slow, deaf, too many, or send no request: no 500, nothing held for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from kit.gateways.gateway_process import GatewayProcess, few, free_port
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from demo.stack import RedisServer, eventually
from gateway.http import connections
from gateway.http.connections import HEAD_BYTES, Connection, Guard

MIB = 2**20
BODY = 2 * MIB
#: Of the fixture `gateway`.
GATEWAY_SETTINGS = {"max_line_bytes": BODY // 2}


def talk(port: int, sent: bytes, *, until_s: float = 20) -> bytes:
    """Send bytes on a connection of their own; return what comes until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=until_s) as client:
        found = b""
        try:
            client.sendall(sent)
            while part := client.recv(65536):
                found += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return found


def ask(port: int, line: bytes, *headers: bytes, body: bytes = b"") -> tuple[int, Any]:
    """Send one request, byte for byte; return status and JSON."""
    head = b"\r\n".join([line + b" HTTP/1.1", b"Host: 127.0.0.1", b"Connection: close", *headers])
    return read(talk(port, head + b"\r\n\r\n" + body))


def read(raw: bytes) -> tuple[int, Any]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else None


PATHS = r"""
/v1/files/../../etc/passwd /v1/files/..%2f..%2fetc%2fpasswd //v1/files /v1//files /v1/files/%00
/v1/files/a%0d%0ab /v1/files/%ff%fe /v1/files/%u0000 /% /%%% /v1/batches/* /v1/batches/a:b%0a
/v1/files/file-1/content/ /v1/models/..%2F..%2F /v1/batches/%e2%80%ae
/v1/files?after=%00&limit=-1 /? /v1/batches?after=warmq:gateway:keys /v1/files/keys /.git/config
/v1/files/\..\x
""".split()


@pytest.mark.parametrize("path", [*PATHS, "/v1/files/" + "a" * 20_000])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_path_is_a_fault_of_the_gateway(gateway: GatewayProcess, method: str, path: str) -> None:
    status, told = ask(gateway.port, f"{method} {path}".encode("latin-1"))
    assert 400 <= status < 500 or (status == 200 and method == "GET"), told
    if status != 200:
        assert set(told["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "sent",
    [
        b"junk\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health HTTP/1.1\r\nBad Header: x\r\n\r\n", b"GET  /health HTTP/1.1\r\n: x\r\n\r\n",
        b"POST /v1/batches HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /v1/batches HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/batches HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/batches HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: a\r\n\r\n", b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_in_the_envelope(
    gateway: GatewayProcess, sent: bytes
) -> None:
    status, told = read(talk(gateway.port, sent + b"\r\n"))
    assert 400 <= status < 500
    assert told["error"]["message"]


def test_a_huge_head_is_refused_whole_or_in_pieces(gateway: GatewayProcess) -> None:
    one = b"X-Large: " + b"a" * (HEAD_BYTES + 1)
    status, told = ask(gateway.port, b"GET /health", one)
    assert status == 431
    assert str(HEAD_BYTES) in told["error"]["message"]
    many = [b"X-%d: %s" % (n, b"b" * 100) for n in range(HEAD_BYTES // 100)]
    assert ask(gateway.port, b"GET /health", *many)[0] == 431
    assert ask(gateway.port, b"GET /" + b"c" * HEAD_BYTES)[0] == 431
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: ")
        got = b""
        try:
            for _ in range(10_000):  # without end
                client.sendall(b"d" * 1000)
        except OSError:
            pass
        with contextlib.suppress(OSError):  # it was still sending when it was cut off
            got = client.recv(65536)
        assert got == b"" or b" 431 " in got
    assert ask(gateway.port, b"GET /health", b"X-Fair: " + b"a" * 30_000)[0] == 200


def test_a_body_that_is_too_large_is_refused_however_it_is_sent(gateway: GatewayProcess) -> None:
    line = b"POST /v1/batches"
    body = b"a" * (BODY + 1)
    status, told = ask(gateway.port, line, b"Content-Length: %d" % len(body), body=body)
    assert status == 413
    assert "WARMQ_MAX_LINE_BYTES" in told["error"]["message"]
    assert ask(gateway.port, line, b"Content-Length: 99999999999")[0] == 413
    headers = (b"Transfer-Encoding: chunked", b"Idempotency-Key: k")
    chunks = (b"10000\r\n" + b"a" * 65536 + b"\r\n") * (BODY // 65536 + 1) + b"0\r\n\r\n"
    assert ask(gateway.port, line, *headers, body=chunks)[0] == 413
    assert ask(gateway.port, b"GET /health")[0] == 200


def test_a_large_body_that_is_no_form_is_not_held_in_memory_for_its_key(
    gateway: GatewayProcess,
) -> None:
    assert gateway.process is not None
    before = peak_kib(gateway.process.pid)
    chunks = (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 1600 + b"0\r\n\r\n"  # 100 MiB
    for kind in (b"application/json", b"Multipart/form-data; boundary=x"):
        headers = (
            b"Transfer-Encoding: chunked",
            b"Idempotency-Key: large",
            b"Content-Type: " + kind,
        )
        head = [b"POST /v1/files HTTP/1.1", b"Host: 127.0.0.1", b"Connection: close", *headers]
        talk(gateway.port, b"\r\n".join([*head, b"", chunks]))
    assert peak_kib(gateway.process.pid) - before < 40 * 1024
    assert ask(gateway.port, b"GET /health")[0] == 200


def peak_kib(pid: int) -> int:
    """Return the most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def test_a_client_that_goes_in_the_middle_leaves_no_trace(gateway: GatewayProcess) -> None:
    before = len(gateway.log_path.read_text())
    for sent in (b"POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
                 b"GET /health HTT"):  # fmt: skip
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.sendall(sent)
    assert ask(gateway.port, b"GET /health")[0] == 200
    assert "Traceback" not in gateway.log_path.read_text()[before:]


async def hold(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Open connections that send nothing, or half a head, in turn."""
    writers = []
    for n in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        if n % 2:
            writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        writers.append(writer)
    return writers


async def test_ten_thousand_idle_connections_cost_little_and_others_are_served(
    gateway: GatewayProcess,
) -> None:
    assert gateway.process is not None
    process = psutil.Process(gateway.process.pid)
    before = process.memory_info().rss
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = 10_000 if hard == resource.RLIM_INFINITY else min(10_000, hard - 500)
    try:
        writers = await hold(gateway.port, count)
        # Those that were silent for HEAD_S are closed: on a slow machine not all are open at once.
        there = sum(c.status == "ESTABLISHED" for c in process.net_connections("tcp"))
        grown = process.memory_info().rss - before
        assert (await asyncio.to_thread(ask, gateway.port, b"GET /health"))[0] == 200
        for writer in writers:
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert there > count // 4
    assert grown < count * 12 * 1024, f"{grown / count:.0f} bytes a connection"


async def test_above_the_limit_a_connection_is_told_so(
    redis_server: RedisServer, gateway: GatewayProcess
) -> None:
    folder = gateway.log_path.parent  # gateways of one Redis share their store
    with GatewayProcess(redis_server.url, folder, descriptors=few(20)) as small:
        writers = await hold(small.port, 20)
        raw = await asyncio.to_thread(
            talk, small.port, b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        )
        assert read(raw)[0] == 503
        assert read(raw)[1]["error"]["code"] == "too_many_connections"
        assert b"retry-after" in raw
        for writer in writers:
            writer.close()
        await asyncio.to_thread(
            eventually, lambda: ask(small.port, b"GET /health")[0] == 200, 10, "there is room again"
        )


# -- time: uvicorn in this process, with bounds of a second --------------------------


async def _small(request: Request) -> PlainTextResponse:
    scope = request.scope
    scope["warmq.headers"] = dict(scope["headers"])
    assert scope["warmq.connection"].has_small_body(scope, 65536, 2.0)
    return await _echo(request)


async def _echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def _endless(_: Request) -> StreamingResponse:
    return StreamingResponse(b"x" * 65536 for _ in iter(int, 1))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, set[Any]]]:
    """Return the port, and the open connections, of a server whose patience is a second."""
    from starlette.applications import Starlette

    for name in ("HEAD_S", "BODY_S", "SLOW_READ_S"):
        monkeypatch.setattr(connections, name, 1.0)
    guard, port = Guard(100), free_port()
    server = uvicorn.Server(uvicorn.Config(
        Starlette(routes=[
            Route("/", _echo, methods=["POST"]),
            Route("/small", _small, methods=["POST"]),
            Route("/endless", _endless),
        ]),
        port=port, loop="uvloop", http=type("C", (Connection,), {"guard": guard}), ws="none",
        log_level="critical", lifespan="off", timeout_graceful_shutdown=1,
    ))  # fmt: skip
    thread = threading.Thread(target=server.run)
    thread.start()
    eventually(lambda: server.started, 20, "the server listens")
    yield port, server.server_state.connections
    server.should_exit = True
    thread.join()


def drip(port: int, first: bytes, drop: bytes, every_s: float = 0.2) -> tuple[float, bytes]:
    """Send bytes, then one more at a time until the other side closes; return seconds, answer."""
    began, got = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", port), timeout=every_s) as client:
        client.sendall(first)
        while time.monotonic() - began < 20:
            try:
                part = client.recv(65536)
                got += part
                if not part:
                    break
                continue
            except TimeoutError:
                pass
            except ConnectionResetError:
                break
            try:
                client.sendall(drop)
            except OSError:
                break
    return time.monotonic() - began, got


def test_a_head_that_drips_is_cut_off(impatient: tuple[int, set[Any]]) -> None:
    seconds, got = drip(impatient[0], b"POST / HTTP/1.1\r\nHost: a\r\nX: ", b"a")
    assert seconds < 5
    assert read(got)[0] == 408


def test_a_connection_that_says_nothing_is_closed(impatient: tuple[int, set[Any]]) -> None:
    seconds, got = drip(impatient[0], b"", b"")
    assert seconds < 5
    assert got == b""


def test_a_body_that_drips_is_cut_off(impatient: tuple[int, set[Any]]) -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
    seconds, got = drip(impatient[0], head, b"a")
    assert seconds < 6
    assert read(got)[0] == 408


def test_a_small_body_must_have_come_in_its_time(impatient: tuple[int, set[Any]]) -> None:
    head = b"POST /small HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n"
    seconds, got = drip(impatient[0], head, b"a" * 500)  # more than BODY_BYTES in BODY_S
    assert seconds < 6
    assert read(got)[0] == 408


def test_a_body_that_keeps_coming_is_waited_for(
    impatient: tuple[int, set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BODY_S", 3.0)  # a busy machine may stop for a second
    count = 20
    head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", impatient[0]), timeout=10) as client:
        client.sendall(head % (count * 1024))
        for _ in range(count):  # four seconds in all
            client.sendall(b"a" * 1024)
            time.sleep(0.2)
        got = client.recv(65536)
    assert got.startswith(b"HTTP/1.1 200")


def test_a_client_that_takes_nothing_is_cut_off(impatient: tuple[int, set[Any]]) -> None:
    port, open_now = impatient
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        eventually(lambda: len(open_now) == 1, 5, "it is connected")
        eventually(lambda: not open_now, 10, "it is cut off")
