"""Answers of a gateway against OpenAI's own schemas (tests/gateway/openai_schemas).

Three things are read with more tolerance than the document has by its letter, which contradicts
itself there: a field that is not required may be null (as in its examples of batches), an embedding
may be base64 (which requests may ask for, and both SDKs do), and a file may have any purpose that
an upload may be for (`evals`).
"""

from __future__ import annotations

import base64
import functools
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import orjson
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from demo.stack import ROOT

WRITTEN = Path(ROOT) / "tests" / "gateway" / "openai_schemas" / "schemas.json"
_ID = "urn:openai"
_NULL = {"type": "null"}
JSON, EVENTS = "application/json", "text/event-stream"
#: Streamed completions have no schema of their own in the document; they are as whole ones are,
#: but that most chunks have no `finish_reason` yet.
_STREAMED = {"POST /completions": "CreateCompletionResponse"}


@functools.cache
def _cut() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(WRITTEN.read_bytes())
    return found


@functools.cache
def _registry() -> Registry[Any]:
    tolerant = {"components": {"schemas": _tolerant(_cut()["schemas"])}}
    tolerant["components"]["schemas"]["OpenAIFile"]["properties"]["purpose"]["enum"].append("evals")
    return Registry().with_resource(_ID, DRAFT202012.create_resource(tolerant))


def _tolerant(schema: Any) -> Any:
    """Return a schema in which what is not required may be null; OpenAPI 3.0's `nullable` too."""
    if isinstance(schema, list):
        return [_tolerant(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    required = schema.get("required", ())
    made = {key: _tolerant(value) for key, value in schema.items() if key != "nullable"}
    if isinstance(schema.get("$ref"), str):
        made["$ref"] = schema["$ref"].replace("#", _ID + "#")
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {
            name: value if name in required else {"anyOf": [value, _NULL]}
            for name, value in made["properties"].items()
        }
    return {"anyOf": [made, _NULL]} if schema.get("nullable") is True else made


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    assert name in _cut()["schemas"], f"schemas.json has no {name}"
    where = {"$ref": f"{_ID}#/components/schemas/{name}"}
    return jsonschema.Draft202012Validator(where, registry=_registry())


def validates(name: str, answer: Any) -> None:
    """Assert that an answer is as OpenAI's schema of that name wants it."""
    fault = fault_of(name, answer)
    assert fault is None, fault


def fault_of(name: str, answer: Any) -> str | None:
    """Return what is wrong with an answer by OpenAI's schema of that name; None if nothing is."""
    found = jsonschema.exceptions.best_match(_validator(name).iter_errors(answer))
    if found is None:
        return None
    return f"{name}{found.json_path[1:]}: {found.message[:400]}"


def schema_of(method: str, path: str, kind: str) -> str | None:
    """Return the schema's name of a route's answer; None if OpenAI has no such route."""
    # A model's name may have slashes, so a longer route is tried first.
    for route, answers in sorted(_cut()["routes"].items(), key=lambda each: -len(each[0])):
        of, _, template = route.partition(" ")
        if of == method and re.fullmatch("/v1" + re.sub(r"\{[^}]*\}", "[^?]+", template), path):
            if kind == EVENTS and route in _STREAMED:
                return _STREAMED[route]
            found: str | None = answers.get(kind)
            return found
    return None


def faults_in(method: str, path: str, status: int, kind: str, body: bytes) -> list[str]:
    """Return what is wrong with a whole answer, for the routes and errors that OpenAI has."""
    if path.startswith("/v1/messages"):
        return []  # Anthropic's
    kind = kind.partition(";")[0]
    if status >= 400:
        if kind != JSON:
            return [f"status {status} has no envelope: {kind!r} {body[:200]!r}"]
        return _told([fault_of("ErrorResponse", orjson.loads(body))])
    name = schema_of(method, path, kind)
    if name is None:
        return []
    if kind == EVENTS:
        return _told(_event_fault(name, event) for event in events_in(body))
    return _told([fault_of(name, _with_floats(orjson.loads(body)))])


def events_in(body: bytes) -> Iterator[Any]:
    """Yield what the whole events of a stream carry; comments and the end carry nothing."""
    *whole, _ = body.replace(b"\r\n", b"\n").split(b"\n\n")
    for event in whole:
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines and lines != [b"[DONE]"]:
            yield orjson.loads(b"\n".join(lines))


def _event_fault(name: str, event: Any) -> str | None:
    if event.get("error"):
        return fault_of("ErrorResponse", event)
    if name == "CreateCompletionResponse":
        choices = [c | {"finish_reason": c["finish_reason"] or "stop"} for c in event["choices"]]
        event = event | {"choices": choices}
    return fault_of(name, event)


def _with_floats(answer: Any) -> Any:
    """Return an answer whose base64 embeddings are lists of numbers."""
    if answer.get("object") == "list":
        for each in answer["data"]:
            if isinstance(each.get("embedding"), str):
                raw = base64.b64decode(each["embedding"], validate=True)
                each["embedding"] = list(struct.unpack(f"<{len(raw) // 4}f", raw))
    return answer


def _told(faults: Any) -> list[str]:
    return [fault for fault in faults if fault is not None]
