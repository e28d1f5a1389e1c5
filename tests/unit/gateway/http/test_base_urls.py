"""A client whose base URL lacks /v1 is told so."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from gateway.app import _of_http


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("GET", "/batches", "but /v1/batches: end the client's base URL with /v1"),
        ("GET", "/other", "docs/gateway.md"),
        ("GET", "/v1/v1/batches", "docs/gateway.md"),
    ],
)
async def test_the_route_that_was_meant_is_named(method: str, path: str, told: str) -> None:
    async def route(_: Any) -> Any:
        raise NotImplementedError

    app = Starlette(routes=[Route("/v1/batches", route)])
    scope = {"type": "http", "method": method, "path": path, "headers": [], "app": app}
    scope |= {"query_string": b"", "root_path": "", "server": ("h", 80), "scheme": "http"}
    response = await _of_http(Request(scope), HTTPException(404))
    assert told in bytes(response.body).decode()
