"""Answers an error before any route is reached, in OpenAI's envelope or Anthropic's."""

from __future__ import annotations

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.errors import ApiError, answer

#: Anthropic's types by status; others are `invalid_request_error`, from 500 on `api_error`.
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def anthropic_body(error: ApiError, request_id: str | None) -> bytes:
    """Return an error as Anthropic's clients read it."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    told = {"type": _TYPES.get(error.status, other), "message": error.message}
    return orjson.dumps({"type": "error", "error": told, "request_id": request_id})


def response_for(scope: Scope, error: ApiError) -> Response:
    """Return the response for an error, in the form that the path's clients read."""
    path: str = scope.get("path", "")
    if path != "/v1/messages" and not path.startswith("/v1/messages/"):
        return answer(error)
    request_id: str | None = scope.get("warmq.request_id")
    headers = {**error.headers, **({"request-id": request_id} if request_id else {})}
    body = anthropic_body(error, request_id)
    return Response(body, error.status, headers, "application/json")


def stopping() -> ApiError:
    """Return the error for a request whose gateway is told to stop, and has waited long enough."""
    return ApiError(503, "this gateway stops; try again", code="gateway_stops", after_s=1)


async def refuse(
    scope: Scope, receive: Receive, send: Send, error: ApiError, *, close: bool = False
) -> None:
    """Answer an error; with `close` the connection is not used again: its body is unread."""
    response = response_for(scope, error)
    if close:
        response.headers["connection"] = "close"
    await response(scope, receive, send)
