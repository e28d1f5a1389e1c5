"""Errors as clients read them, in OpenAI's envelope or Anthropic's: a status, and whether a retry
helps."""

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
    """An answer that is an error: the caller's mistake, a limit, or something that is away.

    `param` names the field. With `retry` false the SDKs, which by themselves retry 408, 409, 429
    and 5xx, are told not to; `after_s` says when it makes sense. With `close` the
    connection is not used again: a body is left unread that is too large to be dropped.
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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else _INVALID)
        self.retry = retry
        self.after_s = after_s
        self.close = close

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The envelope."""
        error = {
            "message": self.message, "type": self.type, "param": self.param, "code": self.code
        }  # fmt: skip
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that say whether and when to try again."""
        found = {}
        if self.retry is not None:
            found["x-should-retry"] = str(self.retry).lower()
        if self.after_s is not None:
            found["retry-after"] = f"{max(1, round(self.after_s))}"
        if self.close:
            found["connection"] = "close"
        return found


_INVALID = "invalid_request_error"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          429: "rate_limit_exceeded"}  # fmt: skip
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def anthropic_error(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    """Return an error as Anthropic's clients read it: its type is that of its status."""
    other = "api_error" if status >= 500 else _INVALID
    told = {"type": _ANTHROPIC_TYPES.get(status, other), "message": message}
    return {"type": "error", "error": told, "request_id": request_id}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error for a wrong parameter; the message says what to give instead."""
    return ApiError(400, message, code=code, param=param)


def not_found(what: str, name: str) -> ApiError:
    """Return the error for what is not there, or is another tenant's: the two look alike."""
    return ApiError(404, f"No such {what}: {name[:200]}", code=f"{what}_not_found", param="id")


def api_error(error: Exception) -> ApiError:
    """Return the answer for an error: itself, or what clients are told of another one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRejected):
        status = 404 if error.code == "model_not_found" else 400
        return ApiError(status, error.message, code=error.code, param=error.field)
    if isinstance(error, StoreFull):
        # How full Redis is concerns the operator, who reads the log.
        told = "the queue is full; what you sent was not taken, try again later"
        return ApiError(503, told, code="queue_full", after_s=5)
    if isinstance(error, StoreUnavailable) and not isinstance(error, StoreForbidden):
        # What Redis and its address are called concerns the operator, who reads the log.
        return ApiError(503, "the queue cannot be reached; try again", code=error.code, after_s=2)
    if isinstance(error, FileStoreFailed):
        return ApiError(507, "the gateway cannot keep the file", code=error.code, after_s=30)
    if isinstance(error, ProtocolMismatch):
        return ApiError(409, str(error), code=error.code)
    if isinstance(error, RequestFailed):
        return ApiError(503, error.message, code=error.code, after_s=1)
    return ApiError(500, "the gateway failed; its log says why", code="internal_error")


def json_error(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response for an error."""
    return Response(
        orjson.dumps(error.body),
        status_code=error.status,
        headers={**error.headers, **(headers or {})},
        media_type="application/json",
    )


def anthropic_body(error: ApiError, request_id: str | None) -> bytes:
    """Return an error as Anthropic's clients read it."""
    return orjson.dumps(anthropic_error(error.status, error.message, request_id))


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return the response for an error, in the form that the path's clients read."""
    path: str = scope.get("path", "")
    if path != "/v1/messages" and not path.startswith("/v1/messages/"):
        return json_error(error)
    request_id: str | None = scope.get("warmq.request_id")
    headers = {**error.headers, **({"request-id": request_id} if request_id else {})}
    body = anthropic_body(error, request_id)
    return Response(body, error.status, headers, "application/json")


def new_request_id() -> str:
    """Return the id of a request, which its answer carries."""
    return f"req_{secrets.token_hex(16)}"


def gateway_stops() -> ApiError:
    """Return the error for a request whose gateway is told to stop, and has waited long enough."""
    return ApiError(503, "this gateway stops; try again", code="gateway_stops", after_s=1)


async def send_error(
    scope: Scope, receive: Receive, send: Send, error: ApiError, *, close: bool = False
) -> None:
    """Answer an error; with `close` the connection is not used again: its body is unread."""
    response = error_response(scope, error)
    if close:
        response.headers["connection"] = "close"
    await response(scope, receive, send)
