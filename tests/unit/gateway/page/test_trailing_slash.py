"""Paths of pages with a slash at the end."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette

from gateway.page.routes import routes


@pytest.mark.parametrize(("path", "to"), [
    ("/ui/", "/ui"),
    ("/ui/?lang=ko", "/ui?lang=ko"),
    ("/ui/batches/", "/ui/batches"),
    ("/ui/batches/a%25b%20c/?text=x", "/ui/batches/a%25b%20c?text=x"),
    ("/ui//", "/ui"),
])  # fmt: skip
async def test_a_page_is_found_with_a_slash_at_the_end(path: str, to: str) -> None:
    app = Starlette(routes=routes())
    app.router.redirect_slashes = False
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.get(path)
        assert (answer.is_redirect, answer.headers["location"]) == (True, to)
        assert "cache-control" in answer.headers
        assert (await client.get("/uix/")).status_code == 404
        assert (await client.post(path)).status_code == 405
