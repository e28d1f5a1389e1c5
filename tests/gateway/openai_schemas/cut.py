"""Cut the schemas of the gateway's routes out of OpenAI's OpenAPI document.

    python tests/gateway/openai_schemas/cut.py openapi.json COMMIT

`openapi.json` is the file of that name at that commit of github.com/openai/openai-openapi (MIT,
see LICENSE here). schemas.json keeps which schema each answer has, and these schemas with all that
they refer to. Nothing in them is changed; prose, examples and vendor fields (`x-…`) are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WRITTEN = Path(__file__).parent / "schemas.json"
#: Routes of the document that the gateway serves.
ROUTES = (
    "POST /files", "GET /files", "GET /files/{file_id}", "DELETE /files/{file_id}",
    "POST /uploads", "POST /uploads/{upload_id}/parts", "POST /uploads/{upload_id}/complete",
    "POST /uploads/{upload_id}/cancel",
    "POST /batches", "GET /batches", "GET /batches/{batch_id}", "POST /batches/{batch_id}/cancel",
    "POST /chat/completions", "POST /completions", "POST /embeddings", "POST /responses",
    "GET /responses/{response_id}", "POST /responses/{response_id}/cancel",
    "GET /responses/{response_id}/input_items", "GET /models", "GET /models/{model}",
)  # fmt: skip
#: Schemas that no route's answer names: all errors, the bodies of webhooks.
BESIDES = (
    "ErrorResponse", "WebhookBatchCompleted", "WebhookBatchFailed", "WebhookBatchExpired",
    "WebhookBatchCancelled",
)  # fmt: skip
_PROSE = ("description", "example", "examples", "title", "externalDocs")


def cut(document: dict[str, Any], commit: str) -> dict[str, Any]:
    """Return what schemas.json holds."""
    routes = {route: _answers(document, route) for route in ROUTES}
    named = [name for answers in routes.values() for name in answers.values()]
    all_schemas = document["components"]["schemas"]
    return {
        "source": {
            "repository": "https://github.com/openai/openai-openapi", "commit": commit,
            "version": document["info"]["version"], "license": document["info"]["license"]["name"],
        },
        "routes": routes,
        "schemas": {
            name: _bare(all_schemas[name])
            for name in sorted(_with_references(all_schemas, [*named, *BESIDES]))
        },
    }  # fmt: skip


def _answers(document: dict[str, Any], route: str) -> dict[str, str]:
    """Return the schema's name by the answer's media type."""
    method, path = route.split()
    content = document["paths"][path][method.lower()]["responses"]["200"]["content"]
    return {kind: _name(answer["schema"]["$ref"]) for kind, answer in content.items()}


def _with_references(schemas: dict[str, Any], names: list[str]) -> set[str]:
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            names += _references(schemas[name])
    return found


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield _name(node["$ref"])
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _name(reference: str) -> str:
    return reference.rsplit("/", 1)[1]


def _bare(schema: Any) -> Any:
    """Return a schema without prose; a property may itself be called `title`."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _bare(each) for name, each in value.items()} if key == "properties"
        else value if key in ("enum", "const", "default", "required") else _bare(value)
        for key, value in schema.items()
        if key not in _PROSE and not key.startswith("x-")
    }  # fmt: skip


if __name__ == "__main__":
    kept = cut(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
    WRITTEN.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
