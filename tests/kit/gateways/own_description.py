"""Answers of a gateway against the gateway's own OpenAPI document (`/openapi.json`)."""

from __future__ import annotations

import functools
import re
from typing import Any

import jsonschema
import orjson
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from gateway.description.document import document

_ID = "urn:warmq"


@functools.cache
def _described() -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(orjson.dumps(document()))
    return found


@functools.cache
def _registry() -> Registry[Any]:
    return Registry().with_resource(_ID, DRAFT202012.create_resource(_described()))


@functools.cache
def _validator(pointer: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"{_ID}#{pointer}"}, registry=_registry())


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return each path as a pattern; those without parameters come first."""
    paths = sorted(_described()["paths"], key=lambda path: path.count("{"))
    return [
        (re.compile(re.sub(r"\{\w+\}", ".+" if "model" in p else "[^/]+", p)), p) for p in paths
    ]


def faults_by_description(
    method: str, path: str, status: int, kind: str, body: bytes
) -> list[str]:  # fmt: skip
    """Return what is wrong with a whole JSON answer by what the gateway says of itself."""
    if status >= 400:
        name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        return _faults(f"/components/schemas/{name}", body)
    found = next((path_ for pattern, path_ in _patterns() if pattern.fullmatch(path)), None)
    operation = _described()["paths"].get(found, {}).get(method.lower())
    if operation is None:
        return [f"{method} {path} is answered, and not in /openapi.json"]
    answers = operation["responses"].get(str(status))
    kind = kind.partition(";")[0]
    if answers is None or kind not in answers.get("content", {}):
        return [f"/openapi.json has no answer {status} of {kind} for {method} {found}"]
    if kind != "application/json":
        return []
    escaped = found.replace("/", "~1").replace("{", "%7B").replace("}", "%7D")
    where = f"/paths/{escaped}/{method.lower()}/responses/{status}/content/application~1json/schema"
    return _faults(where, body)


def _faults(pointer: str, body: bytes) -> list[str]:
    wrong = jsonschema.exceptions.best_match(_validator(pointer).iter_errors(orjson.loads(body)))
    return [] if wrong is None else [f"by /openapi.json, {wrong.json_path}: {wrong.message[:300]}"]
