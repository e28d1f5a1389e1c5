"""Makes the OpenAPI 3.1 document out of the table of operations and the types that they name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.version import version
from gateway.description import operations
from gateway.description.operations import EVENTS, JSON, Operation, Schema

_PARAMETER = re.compile(r"\{(\w+)\}")
#: Anthropic's types have names that OpenAI's have, too.
_ANTHROPIC = "Anthropic"
_ENVELOPE: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"},
                "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
            },
        }
    },
}  # fmt: skip
_ANTHROPIC_ENVELOPE: Schema = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}
_STREAM: dict[str, Schema] = {
    "stream": {"type": ["boolean", "null"]},
    "stream_options": {
        "type": ["object", "null"],
        "properties": {
            "include_usage": {"type": ["boolean", "null"]},
            "continuous_usage_stats": {"type": ["boolean", "null"]},
        },
    },
}


def document() -> dict[str, Any]:
    """Return the document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations.ALL:
        method, _, path = operation.route.partition(" ")
        paths.setdefault(path, {})[method.lower()] = _operation(operation, path)
    errors = {"Error": _ENVELOPE, f"{_ANTHROPIC}Error": _ANTHROPIC_ENVELOPE}
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
            "schemas": errors | _types(),
            "responses": {name: _error(name) for name in errors},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _is_anthropic(route: str) -> bool:
    return "/v1/messages/batches" in route


def _types() -> dict[str, Schema]:
    """Return the schemas of all types that the operations name."""
    found: dict[str, Schema] = {}
    for anthropic in (False, True):
        prefix = _ANTHROPIC if anthropic else ""
        named = [
            kind
            for operation in operations.ALL
            if _is_anthropic(operation.route) is anthropic
            for kind in (operation.answer, operation.body)
            if isinstance(kind, type)
        ]
        template = f"#/components/schemas/{prefix}{{name}}"
        _, schemas = msgspec.json.schema_components(named, ref_template=template)
        found |= {prefix + name: schema for name, schema in schemas.items()}
    for operation in operations.ONLINE:
        if isinstance(operation.body, type):
            schema = found[operation.body.__name__]
            # Fields that OpenAI's servers alone know are taken, and mean nothing.
            schema.pop("additionalProperties", None)
            if operation.streams:
                schema["properties"] |= _STREAM
    return found


def _schema(kind: Any, route: str) -> Schema:
    if isinstance(kind, type):
        prefix = _ANTHROPIC if _is_anthropic(route) else ""
        return {"$ref": f"#/components/schemas/{prefix}{kind.__name__}"}
    found: Schema = kind
    return found


def _operation(operation: Operation, path: str) -> dict[str, Any]:
    content = {operation.answers_as: {"schema": _schema(operation.answer, operation.route)}}
    if operation.streams:
        content[EVENTS] = {"schema": {"description": "Server-sent events, as OpenAI's."}}
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    made: dict[str, Any] = {
        "summary": operation.does,
        "operationId": _operation_id(operation.route),
        "parameters": list(_parameters(operation, path)),
        "responses": {
            "200": {"description": "Done.", "content": content},
            "default": {"$ref": f"#/components/responses/{error}"},
        },
    }
    if operation.partial:
        made["responses"] |= _RANGES
    if operation.body is not None:
        schema = _schema(operation.body, operation.route)
        body = {"required": True, "content": {operation.body_as: {"schema": schema}}}
        made["requestBody"] = body
    if operation.open:
        made["security"] = []
    return made


_RANGES: dict[str, Any] = {
    "206": {
        "description": "The range that was asked for.",
        "content": {operations.BYTES: {"schema": {"type": "string"}}},
    },
    "304": {"description": "The content is the one that If-None-Match names."},
    "307": {"description": "The batch has ended; its file is at Location."},
}


def _parameters(operation: Operation, path: str) -> Iterable[dict[str, Any]]:
    for name in _PARAMETER.findall(path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name, schema in (operation.query or {}).items():
        yield {"name": name, "in": "query", "required": False, "schema": schema}


def _operation_id(route: str) -> str:
    """Return a name such as `post_v1_batches_batch_id_cancel`."""
    return re.sub(r"\W+", "_", route).strip("_").lower()


def _error(name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": "What is wrong, and what to do.", "content": {JSON: {"schema": schema}}}


@functools.cache
def _json() -> bytes:
    return orjson.dumps(document())


def _openapi(_: Request) -> Response:
    return Response(_json(), media_type="application/json")


def routes() -> list[Route]:
    """Return the route."""
    return [Route("/openapi.json", _openapi)]
