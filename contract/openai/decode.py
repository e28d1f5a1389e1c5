"""Decodes untrusted JSON within bounds of memory and depth.

Decoding a line that has only brackets takes 30 times its size (10 MB become 350 MB), so the values
are counted first. Counting takes 1 ms per MB; a text below half a megabyte is not counted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from operator import is_
from typing import Any

import orjson

from contract.errors import RequestRejected

#: Most JSON values in one text. Each takes up to 125 bytes when decoded, all of them 60 MB. A
#: prompt of token ids has a value for each token.
MAX_VALUES = 500_000
#: Most levels of nesting; orjson writes 254 levels and reads 1,024.
MAX_DEPTH = 250
_READ_DEPTH = 1_024
#: Most bytes of a text that needs no look at its depth: each level has two brackets, and before
#: Python 3.12 msgspec reads no deeper than Python's own limit of recursion.
SHALLOW = 2 * _READ_DEPTH if sys.version_info >= (3, 12) else sys.maxsize

# The end quote is optional, so that an unclosed string is one match, not a match at each quote.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


def decode(raw: bytes) -> Any:
    """Decode a JSON text; raise RequestRejected if it is invalid or has over MAX_VALUES values."""
    if (
        len(raw) > MAX_VALUES
        and _count_separators(raw, 0, len(raw)) > MAX_VALUES
        and _has_too_many_values(raw)
    ):
        raise RequestRejected(f"more than {MAX_VALUES} JSON values in one request; split it")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestRejected(
            f"not valid JSON: {error.msg} at character {error.pos}; "
            "write one JSON object per line, in UTF-8",
            code="invalid_json",
        ) from None


def may_be_too_deep(raw: bytes) -> bool:
    """Return whether a JSON text has enough brackets to be deeper than orjson reads.

    orjson then has to judge it, because msgspec's limit depends on the release of Python.
    """
    # The brackets at either end are too few; usually a long text is between them.
    middle = _READ_DEPTH, len(raw) - _READ_DEPTH
    if raw.find(b"[", *middle) < 0 and raw.find(b"{", *middle) < 0:
        return False
    return raw.count(b"[") + raw.count(b"{") > _READ_DEPTH


def encode(value: Any) -> bytes:
    """Encode a decoded value again; raise RequestRejected if it is nested too deep."""
    try:
        return orjson.dumps(value)
    except TypeError:  # orjson.JSONEncodeError; a decoded value fails for no other reason
        raise RequestRejected(
            f"nested more than {MAX_DEPTH} levels deep; make it flatter"
        ) from None


def _count_separators(raw: bytes, start: int, end: int) -> int:
    """Count commas and opening brackets: each value except the first follows one of them."""
    return raw.count(b",", start, end) + raw.count(b"[", start, end) + raw.count(b"{", start, end)


def _has_too_many_values(raw: bytes) -> bool:
    """Return whether a text has too many values; the content of strings is not counted."""
    separators = at = 0
    for strings, found in enumerate(_STRING.finditer(raw)):
        separators += _count_separators(raw, at, found.start())
        if separators > MAX_VALUES or strings > 2 * MAX_VALUES:  # keys are strings too
            return True
        at = found.end()
    return separators + _count_separators(raw, at, len(raw)) > MAX_VALUES


def printable(text: str, limit: int = 80) -> str:
    """Shorten untrusted text for a message, and escape its control characters."""
    short = text if len(text) <= limit else text[:limit] + "…"
    return short if short.isprintable() else repr(short)[1:-1]


#: Fields of JSON schemas with bounds. JSON Schema allows 16.0 for them, xgrammar does not.
_BOUNDS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains",
     "minProperties", "maxProperties")
)  # fmt: skip


def int_if_whole(value: Any) -> Any:
    """Return a number or list with ints for whole floats; the same object if none changed."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        entries = [int_if_whole(one) for one in value]
        return value if all(map(is_, entries, value)) else entries
    return value


def int_if_whole_at(value: Any, path: Sequence[str]) -> Any:
    """Return a value with ints for whole floats at a path of keys or indexes."""
    if isinstance(value, dict) and path and path[0] in value:
        return value | {path[0]: int_if_whole_at(value[path[0]], path[1:])}
    # msgspec's path leaves out the key of an entry of an object with free keys, so all entries are
    # converted.
    if isinstance(value, dict) and path:
        return {key: int_if_whole_at(one, path[1:]) for key, one in value.items()}
    if isinstance(value, list) and path:
        return [int_if_whole_at(one, path[1:]) for one in value]
    return int_if_whole(value)


def int_bounds(value: Any) -> Any:
    """Return a JSON schema with ints as bounds; the same object if none changed.

    The schema's depth must have been checked.
    """
    if isinstance(value, list):
        entries = [int_bounds(one) for one in value]
        return value if all(map(is_, entries, value)) else entries
    if isinstance(value, dict):
        fields = {
            key: int_if_whole(one) if key in _BOUNDS else int_bounds(one)
            for key, one in value.items()
        }
        return value if all(map(is_, fields.values(), value.values())) else fields
    return value
