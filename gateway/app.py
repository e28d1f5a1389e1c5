"""Builds the Starlette application: its routes, middleware and error handlers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.errors import WarmqError
from contract.log_lines import set_log_fields
from contract.traces import tracer
from contract.version import version
from gateway.auth import Auth
from gateway.batches.anthropic import batches as anthropic
from gateway.batches.api import routes as batches
from gateway.description import document as description
from gateway.files import routes as files
from gateway.http.audit import WriteAudit
from gateway.http.bodies import BodyMemoryLimit, BodySizeLimit
from gateway.http.caller import Caller
from gateway.http.errors import (
    ApiError,
    api_error,
    error_response,
    gateway_stops,
    invalid,
    new_request_id,
    send_error,
)
from gateway.http.idempotency import Idempotency
from gateway.http.json_api import reply
from gateway.http.services import Services
from gateway.http.tracing import TraceMiddleware
from gateway.metrics import routes as metrics
from gateway.metrics.series import CountRequests, RouteCounts
from gateway.online import endpoint as online
from gateway.online.responses import routes as responses
from gateway.online.state import online_state
from gateway.page import routes as page
from gateway.redis.idempotency import Renewals
from gateway.sweeping import removing_expired
from gateway.webhooks.delivering import delivering

log = logging.getLogger(__name__)


#: Headers that a request may not send with two values: a proxy might use one of them, and this
#: gateway the other.
_ONCE = frozenset((
    b"authorization", b"x-api-key", b"host", b"origin", b"idempotency-key", b"sec-fetch-site",
))  # fmt: skip


def conflicting_header(headers: list[tuple[bytes, bytes]]) -> ApiError | None:
    """Return the error for a header of _ONCE that comes with two different values, or None."""
    first_values: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _ONCE and first_values.setdefault(name, value) != value:
            message = f"the request has two different {name.decode()} headers; send one"
            return invalid(message, code="invalid_header")
    return None


class RequestContext:
    """Puts a request's id, headers, caller and, later, its status into its scope.

    Every response gets the request's id. Lifespan events skip the inner middleware.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await scope["app"].router(scope, receive, send)
            return
        request_id = new_request_id()
        scope["warmq.request_id"] = request_id
        set_log_fields(request_id=request_id)
        scope["warmq.caller"] = Caller()
        headers = scope["warmq.headers"] = dict(scope["headers"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["warmq.status"] = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    (b"openai-version", b"2020-10-01"),
                ]
            await send(message)

        if len(headers) != len(scope["headers"]) and (
            conflict := conflicting_header(scope["headers"])
        ):
            await send_error(scope, receive, send_with_id, conflict)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the gateway stops, and uvicorn waits no longer
            if "warmq.status" in scope:
                raise
            await send_error(scope, receive, send_with_id, gateway_stops(close=True))
        except Exception as error:
            # Starlette would answer and raise the error again: then uvicorn closes the connection
            # without notice, and the client's next request on it fails. That is right only if the
            # response has begun: the client must notice that the response is not complete.
            if "warmq.status" in scope:
                raise
            response = await _answer_error(Request(scope), error)
            await response(scope, receive, send_with_id)


async def _health(_: Request) -> Response:
    return reply({"status": "ok"})


def _ready(request: Request) -> Response:
    request.app.state.services.batches.ping()
    return reply({"status": "ready"})


async def _version(_: Request) -> Response:
    return reply({"version": version()})


async def _answer_http_error(request: Request, error: HTTPException) -> Response:
    messages = {404: "there is no such route; docs/reference/gateway.md lists all",
                405: "this route takes another method"}  # fmt: skip
    message = messages.get(error.status_code, error.detail)
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND and _is_route(request, f"/v1{path}"):
        message = f"there is no such route, but /v1{path}: end the client's base URL with /v1"
    response = error_response(request.scope, ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


def _is_route(request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.router.routes)


async def _answer_error(request: Request, error: Exception) -> Response:
    answer = api_error(error)
    if answer.status >= 500 and answer is not error:
        problem = f": {error.message}" if isinstance(error, WarmqError) else ""
        log.error(
            "%s %s%s", request.method, request.url.path, problem,
            exc_info=None if problem else error, extra={"action": "request_error"},
        )  # fmt: skip
    return error_response(request.scope, answer)


async def _answer_gone_client(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=499)  # the client has closed the connection


#: The handler of each kind of error. All are coroutines: Starlette runs plain functions in threads,
#: and a gateway that stops may have no thread or time left.
HANDLERS: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
    HTTPException: _answer_http_error,
    ApiError: _answer_error,
    WarmqError: _answer_error,
    ClientDisconnect: _answer_gone_client,
    Exception: _answer_error,
}


def routes() -> list[Route]:
    return [
        *online.routes(),  # first: routes are tried in order, and these get most requests
        Route("/health", _health),
        Route("/ready", _ready),
        Route("/version", _version),
        *metrics.routes(),
        *description.routes(),
        *responses.routes(),
        *anthropic.routes(),
        *batches.routes(),  # before those of files, which match any id
        *files.routes(),
        *page.routes(),
    ]


def build(services: Services) -> Starlette:
    served = routes()
    counted = RouteCounts(served)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        async with (
            removing_expired(services),
            delivering(services),
            metrics.metrics(services, counted) as app.state.metrics,
            online_state(services.settings, services.lookup) as app.state.online,
        ):
            yield
        await services.close_async()

    app = Starlette(routes=served, lifespan=lifespan, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False  # a path with a trailing slash is another path
    # The middleware that is added last is called first.
    renewals = Renewals.using(services.batches)
    app.add_middleware(Idempotency, store=services.idempotency, renewals=renewals)
    app.add_middleware(WriteAudit, limits=services.limits)
    settings = services.settings
    app.add_middleware(
        BodyMemoryLimit, most=settings.max_body_bytes, longest_line=settings.max_line_bytes
    )
    host, sessions = services.settings.gateway_host, services.sessions
    app.add_middleware(Auth, lookup=services.lookup, sessions=sessions, host=host)
    app.add_middleware(BodySizeLimit, most=settings.max_body_bytes)
    if (traces := tracer()) is not None:
        app.add_middleware(TraceMiddleware, tracer=traces)
    app.add_middleware(CountRequests, requests=counted)
    app.add_middleware(RequestContext)
    app.state.services = services
    return app
