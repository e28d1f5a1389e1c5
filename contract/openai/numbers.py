"""Whole numbers that came as floats: 16.0 is 16, as vLLM takes it and pandas writes it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

#: What a JSON schema bounds by whole numbers. xgrammar takes no 16.0 there, and JSON Schema does.
_BOUNDS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains",
     "minProperties", "maxProperties")
)  # fmt: skip


def whole(value: Any) -> Any:
    """Return a value with ints for floats without a fraction; itself, where it has none of them."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        found = [whole(one) for one in value]
        return value if all(map(is_, found, value)) else found
    return value


def whole_at(value: Any, path: Sequence[str]) -> Any:
    """Return a value with whole numbers at a path of keys; a key may stand for an index."""
    if isinstance(value, dict) and path and path[0] in value:
        return value | {path[0]: whole_at(value[path[0]], path[1:])}
    if isinstance(value, dict) and path:  # an entry, whose key msgspec does not tell
        return {key: whole_at(one, path[1:]) for key, one in value.items()}
    if isinstance(value, list) and path:
        return [whole_at(one, path[1:]) for one in value]
    return whole(value)


def whole_bounds(value: Any) -> Any:
    """Return schemas with whole numbers as bounds; the value itself, where it has them. Its nesting
    must be bounded."""
    if isinstance(value, list):
        entries = [whole_bounds(one) for one in value]
        return value if all(map(is_, entries, value)) else entries
    if isinstance(value, dict):
        fields = {k: whole(one) if k in _BOUNDS else whole_bounds(one) for k, one in value.items()}
        return value if all(map(is_, fields.values(), value.values())) else fields
    return value
