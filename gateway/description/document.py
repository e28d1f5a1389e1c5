"""Makes the gateway's OpenAPI 3.1 document from the table in operations.py."""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec
import orjson
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.openai.body import ResponsesBody
from contract.version import version
from gateway.description.operations import (
    BYTES,
    EVENTS,
    JSON,
    ONLINE,
    OPERATIONS,
    Operation,
    Schema,
)
from gateway.online.request import StreamOptions

#: Prefix of the names of Anthropic's types: some of OpenAI's types have the same names.
_ANTHROPIC = "Anthropic"


class Problem(Struct):
    """The problem that an error reports."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """An error as OpenAI's API reports it."""

    error: Problem


class AnthropicProblem(Struct):
    """The problem that an error reports."""

    type: str
    message: str


class AnthropicError(Struct, tag="error"):
    """An error as Anthropic's API reports it."""

    error: AnthropicProblem
    request_id: str | None


class _Streamed(Struct):
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class _Later(Struct):
    background: bool | None = None
    store: bool | None = None


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        method, _, path = operation.route.partition(" ")
        paths.setdefault(path, {})[method.lower()] = _operation(operation, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "warmq's gateway",
            "version": version(),
            "description": "OpenAI's API, and Anthropic's Message Batches, over warmq's queue.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"header": []}, {}],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "responses": {name: _error(name) for name in ("Error", "AnthropicError")},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _prefix(operation: Operation) -> str:
    return _ANTHROPIC if "/v1/messages/batches" in operation.route else ""


def _schemas() -> dict[str, Schema]:
    """Return the schemas of all types that the operations name."""
    schemas: dict[str, Schema] = _components([Error, AnthropicError, _Streamed, _Later], "")
    streamed, later = (schemas.pop(name)["properties"] for name in ("_Streamed", "_Later"))
    for prefix in ("", _ANTHROPIC):
        named = [
            kind
            for operation in OPERATIONS
            if _prefix(operation) == prefix
            for kind in (operation.answer, operation.body)
            if isinstance(kind, type)
        ]
        schemas |= _components(named, prefix)
    schemas[ResponsesBody.__name__]["properties"] |= later
    for operation in ONLINE:
        if isinstance(operation.body, type):
            schema = schemas[operation.body.__name__]
            # Fields that only OpenAI's servers use are accepted and ignored.
            schema.pop("additionalProperties", None)
            if operation.streams:
                schema["properties"] |= streamed
    return schemas


def _components(types: list[Any], prefix: str) -> dict[str, Schema]:
    template = f"#/components/schemas/{prefix}{{name}}"
    _, schemas = msgspec.json.schema_components(types, ref_template=template)
    return {prefix + name: schema for name, schema in schemas.items()}


def _schema(kind: Any, operation: Operation) -> Schema:
    if isinstance(kind, type):
        return {"$ref": f"#/components/schemas/{_prefix(operation)}{kind.__name__}"}
    schema: Schema = kind
    return schema


def _operation(operation: Operation, path: str) -> dict[str, Any]:
    content = {operation.answer_type: {"schema": _schema(operation.answer, operation)}}
    if operation.streams:
        content[EVENTS] = {"schema": {"description": "Server-sent events, as OpenAI's."}}
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    described: dict[str, Any] = {
        "summary": operation.summary,
        # A name such as `post_v1_batches_batch_id_cancel`.
        "operationId": re.sub(r"\W+", "_", operation.route).strip("_").lower(),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)\}", path)
        ] + [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in (operation.query or {}).items()
        ],
        "responses": {
            "200": {"description": "Done.", "content": content},
            "default": {"$ref": f"#/components/responses/{error}"},
        },
    }  # fmt: skip
    if operation.ranges:
        described["responses"] |= _RANGES
    if operation.body is not None:
        schema = _schema(operation.body, operation)
        body = {"required": True, "content": {operation.body_type: {"schema": schema}}}
        described["requestBody"] = body
    if operation.open:
        described["security"] = []
    return described


_RANGES: dict[str, Any] = {
    "206": {
        "description": "The requested range.", "content": {BYTES: {"schema": {"type": "string"}}}
    },
    "304": {"description": "The content is the one that If-None-Match names."},
    "307": {"description": "The batch has ended; its file is at Location."},
}  # fmt: skip


def _error(name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": "The problem, and its remedy.", "content": {JSON: {"schema": schema}}}


@functools.cache
def _json() -> bytes:
    return orjson.dumps(document())


def _openapi(_: Request) -> Response:
    return Response(_json(), media_type="application/json")


def routes() -> list[Route]:
    """Return the route of /openapi.json."""
    return [Route("/openapi.json", _openapi)]
