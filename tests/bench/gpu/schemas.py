"""Requests whose answers are bound to JSON schemas: the schemas, prompts and lines of a file."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from typing import Any

#: The most tokens of an answer by the fields of its schema; random weights write 11 for each field.
MOST = {5: 96, 50: 768}
TOKENS_A_FIELD = 11
VALUES: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 4},
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"enum": ["good", "bad", "mixed"]},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 1},
)


def schema(fields: int, number: int, run: int, mixed: bool = False) -> dict[str, Any]:
    """Return a schema; each other number or run has the names in another order.

    With `mixed` the fields' kinds are in another order, too: then two answers of the same length
    are not at the same kind of token.
    """
    # One character a name: the tokenizer of the random weights has few longer words.
    letters = string.ascii_letters + string.digits
    drawn = random.Random(f"{run} {number}")
    names = drawn.sample(letters, fields)
    values = [VALUES[at % len(VALUES)] for at in range(fields)]
    if mixed:
        drawn.shuffle(values)
    properties = dict(zip(names, values, strict=True))
    return {
        "type": "object", "properties": properties, "required": names,
        "additionalProperties": False,
    }  # fmt: skip


def schemas_of(fields: int, schemas: int, run: int, mixed: bool = False) -> list[dict[str, Any]]:
    """Return all schemas of a run."""
    return [schema(fields, number, run, mixed) for number in range(schemas)]


def prompt(number: int) -> str:
    """Return the prompt of one request."""
    return f"Question number {number}: what is the first letter of the alphabet?"


def body(number: int, fields: int, made: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a request as its line in a file has it."""
    wanted = {"name": "answer", "schema": made[number % len(made)]}
    return {
        "prompt": prompt(number), "max_tokens": MOST[fields], "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": wanted},
    }  # fmt: skip
