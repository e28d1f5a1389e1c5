"""Holds what `producer ... --json` prints to docs/reference/json.schema.json."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import orjson
from jsonschema import Draft202012Validator

from demo.stack import ROOT

SCHEMA = ROOT / "docs/reference/json.schema.json"
#: The document that a command prints with --json.
DOCUMENTS = {
    "cancel": "changed",
    "dead delete": "dead_changed",
    "dead list": "dead_letters",
    "dead retry": "dead_changed",
    "dead show": "dead_letter_message",
    "delete": "deleted",
    "doctor": "doctor",
    "keys create": "key_created",
    "keys list": "keys",
    "keys revoke": "key",
    "list": "batches",
    "plan": "plan",
    "records": "tenants_records",
    "records -t": "records",
    "results": "results",
    "retry": "changed",
    "run": "run",
    "status": "batch",
    "status --request": "request",
    "submit": "batch",
    "tenant delete": "tenant",
    "tenant forget-answers": "tenant",
    "tenant list": "tenants",
    "tenant set": "tenant",
    "tenant show": "tenant",
    "try": "trial",
    "watch": "batch",
    "watch --request": "stream_entry",
    "webhooks create": "webhook_created",
    "webhooks delete": "webhook",
    "webhooks list": "webhooks",
    "webhooks secret": "webhook_secret",
}


def check(document: str, value: Any) -> None:
    """Raise ValidationError unless the value is that document, with no field besides."""
    _validator(document).validate(value)


def check_printed(args: Sequence[str], stdout: str) -> None:
    """Check the JSON that a command line has printed on stdout; other output is passed over.

    Where results go to stdout too, nothing is checked: they are no documents of this kind.
    """
    document = document_of(args)
    if document is None or _prints_results(args):
        return
    lines = stdout.splitlines()
    if args[0] == "submit" and lines:
        check("submitted", orjson.loads(lines.pop(0)))
    for line in lines:
        check(document, orjson.loads(line))


def document_of(args: Sequence[str]) -> str | None:
    """Return the name of the document that a command line prints, None if it prints none."""
    words = list(args[:1])
    if words in (["dead"], ["keys"], ["tenant"], ["webhooks"]):
        words = list(args[:2])
    if "--json" not in args and words != ["dead", "show"]:
        return None
    if words and words[0] in ("status", "watch") and "--request" in args:
        words.append("--request")
    if words == ["records"] and "-t" in args:
        words.append("-t")
    return DOCUMENTS.get(" ".join(words))


def _prints_results(args: Sequence[str]) -> bool:
    named = [args[i + 1] for i, word in enumerate(args[:-1]) if word in ("-o", "--output")]
    return "-" in named or (args[0] == "results" and not named)


@cache
def _validator(document: str) -> Draft202012Validator:
    schema = orjson.loads(SCHEMA.read_bytes())
    _close(schema)
    Draft202012Validator.check_schema(schema)
    schema["$ref"] = f"#/$defs/{document}"
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def _close(schema: Any) -> None:
    """Forbid fields that are not named, which users must tolerate: none may be left out here."""
    if isinstance(schema, list):
        for part in schema:
            _close(part)
    elif isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            _close(part)
