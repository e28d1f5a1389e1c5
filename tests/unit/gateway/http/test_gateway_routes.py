"""What of the gateway names paths, beside the routes themselves."""

from __future__ import annotations

from gateway.app import routes
from gateway.http.errors import ApiError, response_for
from gateway.http.idempotency import ATTACHING
from gateway.http.writes import _IN_PATH
from gateway.online import endpoint as live


def test_all_online_requests_attach_to_their_first_try_and_nothing_else_does() -> None:
    posts = {r.path for r in live.routes() if "POST" in (r.methods or ())}
    assert posts == ATTACHING
    assert {"/v1/score", "/v1/rerank", "/v1/messages/count_tokens"} <= ATTACHING


def test_audit_finds_ids_in_the_paths_of_routes_alone() -> None:
    kinds = _IN_PATH.pattern.partition("(?:")[2].partition(")")[0].split("|")
    paths = [route.path for route in routes()]
    for kind in kinds:
        assert any(path.startswith(f"/v1/{kind}/{{") for path in paths), kind


def test_errors_of_anthropics_paths_have_anthropics_types() -> None:
    kinds = {
        400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
        404: "not_found_error", 409: "conflict_error", 413: "request_too_large",
        429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 507: "api_error",
    }  # fmt: skip
    for status, kind in kinds.items():
        answer = response_for({"path": "/v1/messages"}, ApiError(status, "no"))
        assert f'"type":"{kind}"'.encode() in answer.body
