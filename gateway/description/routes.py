"""The route of the description."""

from __future__ import annotations

import functools

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.description.document import document


@functools.cache
def _json() -> bytes:
    return orjson.dumps(document())


def _openapi(_: Request) -> Response:
    return Response(_json(), media_type="application/json")


def routes() -> list[Route]:
    """Return the route."""
    return [Route("/openapi.json", _openapi)]
