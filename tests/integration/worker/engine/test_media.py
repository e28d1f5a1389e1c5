"""Media URLs of lines: fetched by vLLM's own code, from public addresses, within limits."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from contract.public_address import is_public
from demo.stack import free_port
from worker.engine.vllm import media

pytestmark = pytest.mark.timeout(180)  # importing vLLM takes seconds


class Refused(ValueError):
    """What the tests' sessions raise."""


def picture() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (2, 3), "red").save(file, "PNG")
    return file.getvalue()


class Site:
    """A web server on this machine: /picture, /large, /slow, /elsewhere (a redirect to `to`)."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.to = ""
        self.port = free_port()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.came.append(request.path)
        if request.path == "/elsewhere":
            raise web.HTTPFound(self.to)
        if request.path == "/slow":
            await asyncio.Event().wait()
        if request.path == "/large":
            return web.Response(body=b"x" * (2 * 2**20))
        if request.path == "/gone":
            raise web.HTTPNotFound
        return web.Response(body=picture())


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    """Yield a running Site, which listens on all of 127.0.0.0/8."""
    made, app = Site(), web.Application()
    app.router.add_get("/{path}", made.answer)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", made.port).start()
    try:
        yield made
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("64:ff9b::808:808", True),
        ("127.0.0.1", False), ("127.9.9.9", False), ("0.0.0.0", False), ("10.1.2.3", False),
        ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False),
        ("::", False), ("fe80::1%eth0", False), ("fd00::1", False), ("ff02::1", False),
        ("::ffff:127.0.0.1", False), ("2002:7f00:1::", False), ("64:ff9b::7f00:1", False),
        ("::127.0.0.1", False), ("::10.0.0.1", False), ("fec0::1", False),
        ("64:ff9b:1::7f00:1", False), ("192.0.0.8", False), ("192.88.99.1", False),
    ],
)  # fmt: skip
def test_what_is_a_public_address(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]"])
async def test_no_spelling_of_this_machine_is_connected_to(host: str) -> None:
    async with site() as here, media.guarded_session(Refused) as session:
        with pytest.raises((Refused, aiohttp.ClientConnectorDNSError, aiohttp.InvalidURL)):
            await session.get(f"http://{host}:{here.port}/picture")
        assert here.came == []


async def test_a_name_is_judged_by_the_address_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look_up(*_: Any, port: int = 0, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", here.port))]

    async with site() as here, media.guarded_session(Refused) as session:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        with pytest.raises(Refused, match=r"leads to 127\.0\.0\.1"):
            await session.get(f"http://public.example:{here.port}/picture")
        assert here.came == []


async def test_a_redirect_is_judged_too() -> None:
    async with (
        site() as here,
        media.guarded_session(Refused, lambda a: a == "127.0.0.1") as session,
    ):
        here.to = f"http://127.0.0.2:{here.port}/picture"
        with pytest.raises(Refused, match=r"leads to 127\.0\.0\.2"):
            await session.get(f"http://127.0.0.1:{here.port}/elsewhere")
        assert here.came == ["/elsewhere"]


async def test_vllm_fetches_through_the_guard_within_its_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.connections import global_http_connection
    from vllm.exceptions import VLLMClientError, VLLMValidationError
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    import worker.engine.vllm.engine  # noqa: F401 - sets the limit on sizes

    connector = MEDIA_CONNECTOR_REGISTRY.load("http")
    data = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "1")
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    async with site() as here:
        root = f"http://127.0.0.1:{here.port}"
        media.guard(global_http_connection, VLLMValidationError)
        try:
            # Refused before anything is sent, data URLs are not touched
            with pytest.raises(VLLMClientError, match="not a public address"):
                await connector.fetch_image_async(f"{root}/picture")
            with pytest.raises(VLLMClientError, match="send a data URL"):
                connector.fetch_image(f"{root}/picture")
            assert here.came == []
            assert (await connector.fetch_image_async(data)).size == (2, 3)
            # And where the address is allowed, size and time are limited
            allowed = media.guarded_session(VLLMValidationError, lambda _: True)
            global_http_connection._async_client.detach()
            global_http_connection._async_client = allowed
            assert (await connector.fetch_image_async(f"{root}/picture")).size == (2, 3)
            with pytest.raises(VLLMClientError, match="VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB"):
                await connector.fetch_image_async(f"{root}/large")
            with pytest.raises(VLLMClientError, match="404"):
                await connector.fetch_image_async(f"{root}/gone")
            with pytest.raises(TimeoutError):
                await connector.fetch_image_async(f"{root}/slow")
            await allowed.close()
        finally:
            media.unguard(global_http_connection)
    assert global_http_connection._async_client is None
