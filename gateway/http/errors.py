"""Defines ApiError, and converts every error to a response of OpenAI's or Anthropic's API."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from contract.errors import (
    ProtocolMismatch,
    RequestFailed,
    RequestRejected,
    StoreForbidden,
    StoreFull,
    StoreUnavailable,
)
from gateway.file_store import FileStoreFailed


class ApiError(Exception):
    """An error that is sent to the caller; `param` names the wrong field.

    The SDKs retry the statuses 408, 409, 429 and 5xx; `retry` overrides this, and `after_s` delays
    the retry. `close` closes the connection, because the rest of the body is not read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        retry: bool | None = None,
        after_s: float | None = None,
        close: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else _INVALID)
        self.headers = dict(headers or {})
        if retry is not None:
            self.headers["x-should-retry"] = str(retry).lower()
        if after_s is not None:
            self.headers["retry-after"] = str(max(1, round(after_s)))
        if close:
            self.headers["connection"] = "close"

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The error as a body of OpenAI's API."""
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}


_INVALID = "invalid_request_error"
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    429: "rate_limit_exceeded",
}  # fmt: skip
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def anthropic_error(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    """Return an error as a body of Anthropic's API; its type follows from the status."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else _INVALID)
    error = {"type": kind, "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error for a wrong parameter; the message must name a valid value."""
    return ApiError(400, message, code=code, param=param)


def not_found(kind: str, name: str) -> ApiError:
    """Return the error for an object that is missing or belongs to another tenant."""
    code = f"{kind.replace(' ', '_')}_not_found"
    return ApiError(404, f"No such {kind}: {name[:200]}", code=code, param="id")


def api_error(error: Exception) -> ApiError:
    """Return any error as an ApiError; details for the operator stay in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRejected):
        status = 404 if error.code == "model_not_found" else 400
        return ApiError(status, error.message, code=error.code, param=error.field)
    if isinstance(error, StoreFull):
        message = "the queue is full and nothing was queued; try again later"
        return ApiError(503, message, code="queue_full", after_s=5)
    if isinstance(error, StoreUnavailable) and not isinstance(error, StoreForbidden):
        return ApiError(503, "the queue cannot be reached; try again", code=error.code, after_s=2)
    if isinstance(error, FileStoreFailed):
        return ApiError(507, "the gateway cannot store the file", code=error.code, after_s=30)
    if isinstance(error, ProtocolMismatch):
        return ApiError(409, str(error), code=error.code)
    if isinstance(error, RequestFailed):
        return ApiError(503, error.message, code=error.code, after_s=1)
    message = "the gateway failed; its log has the reason"
    return ApiError(500, message, code="internal_error")


def json_error(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as a response of OpenAI's API."""
    content, headers = orjson.dumps(error.body), {**error.headers, **(headers or {})}
    return Response(content, error.status, headers, "application/json")


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return an error as a response of the API that the path belongs to."""
    path: str = scope.get("path", "")
    if path != "/v1/messages" and not path.startswith("/v1/messages/"):
        return json_error(error)
    request_id: str | None = scope.get("warmq.request_id")
    headers = {**error.headers, **({"request-id": request_id} if request_id else {})}
    body = orjson.dumps(anthropic_error(error.status, error.message, request_id))
    return Response(body, error.status, headers, "application/json")


def new_request_id() -> str:
    """Return a new request id, for the response's headers."""
    return f"req_{secrets.token_hex(16)}"


def gateway_stops(*, close: bool = False) -> ApiError:
    """Return the error for a request that runs when the gateway stops."""
    message = "this gateway is stopping; try again"
    return ApiError(503, message, code="gateway_stops", after_s=1, close=close)


async def send_error(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """Send an error as the response."""
    await error_response(scope, error)(scope, receive, send)
