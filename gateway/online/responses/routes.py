"""The routes of background responses that exist; online/endpoint.py creates them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.http.errors import invalid
from gateway.http.json_api import caller, page_limit, reply, services
from gateway.online.responses import calls

#: Items on a page of the input: the default, and the most that a caller may ask for.
DEFAULT_LIMIT, MOST = 20, 100
_ORDERS = ("asc", "desc")


def _retrieve(request: Request) -> Response:
    if request.query_params.get("stream", "").lower() in ("true", "1"):
        message = (
            "a background response has no stream here; leave out `stream`, and retrieve the "
            "response again until it has ended"
        )
        raise invalid(message, "stream")
    return reply(calls.retrieve(services(request), caller(request), _id(request)))


def _cancel(request: Request) -> Response:
    return reply(calls.cancel(services(request), caller(request), _id(request)))


def _delete(request: Request) -> Response:
    return reply(calls.delete(services(request), caller(request), _id(request)))


def _items(request: Request) -> Response:
    query = request.query_params
    order = query.get("order", "desc")
    if order not in _ORDERS:
        raise invalid(f"order is {order[:40]!r}; use asc or desc", "order")
    limit = page_limit(query.get("limit"), DEFAULT_LIMIT, MOST)
    page = calls.items(
        services(request), caller(request), _id(request), after=query.get("after", ""),
        limit=limit, oldest_first=order == "asc",
    )  # fmt: skip
    return reply(page)


def _id(request: Request) -> str:
    found: str = request.path_params["response_id"]
    return found


def routes() -> list[Route]:
    """Return the routes."""
    one = "/v1/responses/{response_id}"
    return [
        Route(one, _retrieve, methods=["GET"]),
        Route(one, _delete, methods=["DELETE"]),
        Route(f"{one}/cancel", _cancel, methods=["POST"]),
        Route(f"{one}/input_items", _items, methods=["GET"]),
    ]
