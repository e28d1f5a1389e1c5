"""Bodies that are being read have a budget in sum, and a time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.gateways.gateway_process import GatewayProcess
from starlette.types import Message, Scope

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually
from gateway.http import bodies
from gateway.http.bodies import BodyMemoryLimit, Budget, whole_body
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.redis.api_keys import ApiKeys

SIZE = 19 * 10**6


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[GatewayProcess, str, str]]:
    """Return a gateway and two tenants' keys."""
    server = RedisServer(tmp_path / "redis").start()
    keys = ApiKeys.using(BatchStore(server.client(), ttl_ms=60_000))
    first, second = keys.create("a")[0], keys.create("b")[0]
    with GatewayProcess(server.url, tmp_path) as running:
        yield running, first, second
    server.stop()


def begin(port: int, key: str, path: str = "/v1/chat/completions") -> socket.socket:
    """Send nearly all of a body of 19 MB, or what is taken of it."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(20)
    sock.sendall(
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        f"content-length: {SIZE}\r\n\r\n".encode()
    )
    with contextlib.suppress(ConnectionError):
        sock.sendall(b" " * (SIZE - 1000))
    return sock


def rss_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


def answered(sock: socket.socket) -> bytes:
    """Return what a connection was answered by now."""
    sock.setblocking(False)
    try:
        return sock.recv(65536)
    except BlockingIOError:
        return b""
    finally:
        sock.setblocking(True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/batches"])
def test_many_large_bodies_hold_a_bounded_memory_and_others_are_served(
    gateway: tuple[GatewayProcess, str, str], path: str
) -> None:
    running, first, second = gateway
    assert running.process is not None
    pid, before = running.process.pid, rss_mib(running.process.pid)
    with contextlib.ExitStack() as all_of_them:
        held = [all_of_them.enter_context(begin(running.port, first, path)) for _ in range(40)]
        others_are_served(running, first, second, held, before)
    eventually(lambda: rss_mib(pid) < before + 60, 40, "the memory is given back")


def others_are_served(
    running: GatewayProcess, first: str, second: str, held: list[socket.socket], before: int
) -> None:
    assert running.process is not None
    told: dict[int, bytes] = {}

    def refused() -> bool:
        for sock in held:
            told[sock.fileno()] = told.get(sock.fileno(), b"") + answered(sock)
        return sum(b" 503 " in text for text in told.values()) >= 30

    eventually(refused, 60, "most of them are refused")
    texts = [text for text in told.values() if text]
    assert all(b"too_many_bodies" in t and b"retry-after: 2" in t for t in texts)
    assert rss_mib(running.process.pid) < before + 350
    for key in (first, second):  # a small one of the same key, too
        small = httpx.post(
            f"{running.url}/v1/batches", json={"x": 1}, headers={"authorization": f"Bearer {key}"},
            timeout=10,
        )  # fmt: skip
        assert small.status_code == 400
    large = httpx.post(
        f"{running.url}/v1/batches", content=b"[" + b" " * SIZE, timeout=30,
        headers={"authorization": f"Bearer {second}"},
    )  # fmt: skip
    assert large.status_code == 400


# -- in this process ------------------------------------------------------------------


def body_of(*pieces: bytes, rest: float = 0.0) -> Any:
    """Return a `receive` for a body in pieces; then its client is silent."""
    left = list(pieces)

    async def receive() -> Message:
        if not left:
            await asyncio.sleep(rest or 3600)
        return {"type": "http.request", "body": left.pop(0) if left else b"x", "more_body": True}

    return receive


def scope(key: str = "k", path: str = "/v1/chat/completions") -> Scope:
    return {
        "type": "http", "method": "POST", "path": path, "warmq.caller": Caller(key_id=key),
    }  # fmt: skip


async def test_a_body_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PIECE_S", 0.5)
    caught: list[ApiError] = []

    async def app(_: Scope, receive: Any, send: Any) -> None:
        try:
            await whole_body(receive)
        except ApiError as error:
            caught.append(error)
            await send({"type": "http.response.start", "status": error.status, "headers": []})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    began = time.monotonic()
    await BodyMemoryLimit(app, 10**8, 10**6)(scope(), body_of(b"x" * 10**6, rest=0.1), send)
    assert caught[0].status == 408 and time.monotonic() - began < 5
    assert (b"connection", b"close") in sent[0]["headers"]


class SmallBody:
    """A connection whose request has a small body; `bounded` once it must come in a time."""

    bounded = False

    def has_small_body(self, scope: Scope, most: int, within_s: float) -> bool:
        self.bounded = True
        return True


@pytest.mark.parametrize(
    ("path", "bounded"),
    [
        ("/v1/chat/completions", True), ("/v1/files", False), ("/v1/messages/batches", False),
        ("/v1/uploads/upload_1/parts", False), ("/ui/submit", False),
    ],
)  # fmt: skip
async def test_an_upload_may_take_longer_than_other_small_bodies(path: str, bounded: bool) -> None:
    connection = SmallBody()

    async def app(_: Scope, receive: Any, __: Any) -> None:
        await receive()

    receive = body_of(b"x")
    small = scope(path=path) | {"warmq.connection": connection}
    await BodyMemoryLimit(app, 10**8, 10**6)(small, receive, None)  # type: ignore[arg-type]
    assert connection.bounded == bounded


async def test_a_small_body_that_drips_has_an_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "WHOLE_S", 0.5)

    async def app(_: Scope, receive: Any, __: Any) -> None:
        await whole_body(receive)

    with pytest.raises(ApiError) as caught:
        await BodyMemoryLimit(app, 10**8, 10**6)(scope(), body_of(b"x", rest=0.05), None)  # type: ignore[arg-type]
    assert caught.value.status == 408


async def test_one_key_may_hold_half_and_what_ends_is_given_back() -> None:
    budget = Budget(1000)
    budget.take("a", 400)
    with pytest.raises(ApiError, match="of this key") as caught:
        budget.take("a", 101)
    assert (caught.value.status, caught.value.code) == (503, "too_many_bodies")
    budget.take("b", 500)
    with pytest.raises(ApiError):
        budget.take("c", 101)
    budget.give_back("a", 400)
    budget.take("c", 101)
    budget.give_back("c", 101)
    budget.give_back("b", 500)
    assert not budget.used
