"""Limits the size of an answer's constraints: JSON schemas, regexes, choices, grammars, tools.

An engine compiles a constraint to an automaton, in a time that grows faster than the constraint's
size. The worker limits that time (worker/engine/vllm/grammars.py); this module refuses the largest
constraints before they are queued. A constraint that reaches one of the limits takes xgrammar at
most a second. OpenAI allows a schema 1,000 enum values, and 120,000 characters of names and values.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from contract.errors import bad_field

#: Body fields of any endpoint that may have constraints.
FIELDS = ("response_format", "structured_outputs", "tools", "text", "output_config")
#: Most bytes of one constraint, as JSON; all tools of a body together may have four times as many.
MAX_BYTES = 131_072
#: Most properties of one schema, on all its levels.
MAX_PROPERTIES = 1000
#: Most values in the enums and choices of one schema, on all its levels.
MAX_VALUES = 2000
#: Most subschemas in the lists of one schema, on all its levels.
MAX_BRANCHES = 500
#: Most levels of JSON; a level of a schema takes two or three.
MAX_LEVELS = 100
#: Most repetitions of one pattern; `(a{0,10}){5}` has 50.
MAX_REPETITIONS = 1000
#: Most repetitions of all patterns of one schema.
MAX_ALL_REPETITIONS = 10_000

#: Fields of schemas with a list of subschemas.
_BRANCHES = frozenset(("anyOf", "oneOf", "allOf", "prefixItems", "items", "structures", "tags"))
#: Fields that may have a schema as JSON in a text.
_AS_TEXT = ("json", "structural_tag")
#: Fields of schemas whose entries are properties.
_PROPERTIES = frozenset(("properties", "patternProperties", "dependentSchemas"))
#: Pattern of one part of a regex: an escape, a class, a group's start or end, a repetition, or one
#: character.
_PART = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|(?P<open>\()|(?P<close>\))"
    r"|\{(?P<least>[0-9]+)(?P<comma>,(?P<most>[0-9]*))?\}|.",
    re.DOTALL,
)

#: Number that stands for any larger one.
_MANY = 10**12


def answer_schema(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema that a body's fields ask for; None without one."""
    structured, form = fields.get("structured_outputs"), fields.get("response_format")
    found = structured.get("json") if isinstance(structured, dict) else None
    if isinstance(form, dict) and isinstance(form.get("json_schema"), dict):
        found = form["json_schema"].get("schema")
    found = _decoded(found) if isinstance(found, str) else found
    return found if isinstance(found, dict) else None


def constrains(name: str, value: Any) -> bool:
    """Return whether a value of `response_format` or `structured_outputs` constrains the answer."""
    if name == "response_format" and isinstance(value, dict):
        return value.get("type") != "text"
    return value is not None


def refuse_large(name: str, value: Any, where: str) -> None:
    """Raise RequestRejected if the value of one of FIELDS exceeds a limit.

    `where` precedes the field's name in errors.
    """
    if not value:
        return
    try:
        if name != "tools":
            _refuse_large_constraint(value, MAX_BYTES)
            return
        _refuse_length(value, 4 * MAX_BYTES)
        for tool in value:
            _refuse_large_constraint(tool, MAX_BYTES)
    except _TooLarge as problem:
        raise bad_field(where + name, str(problem)) from None


class _TooLarge(Exception):
    pass


def _refuse_length(value: Any, limit: int) -> None:
    try:
        length = len(orjson.dumps(value))
    except TypeError:  # orjson's error for too many levels
        raise _TooLarge(f"is nested too deep; give at most {MAX_LEVELS} levels") from None
    if length > limit:
        raise _TooLarge(f"has {length} bytes as JSON; give at most {limit}")


def _refuse_large_constraint(value: Any, limit: int) -> None:
    _refuse_length(value, limit)
    counts = {"properties": 0, "values": 0, "branches": 0, "repetitions": 0}
    for level, key, each in _walk(value):
        if level > MAX_LEVELS:
            raise _TooLarge(f"is nested too deep; give at most {MAX_LEVELS} levels")
        _count(key, each, counts)
    for counted, (most, name) in _MOST.items():
        if counts[counted] > most:
            raise _TooLarge(f"has {counts[counted]} {name} altogether; give at most {most}")


#: What is counted -> the most of it, and its name in errors.
_MOST = {
    "properties": (MAX_PROPERTIES, "properties"),
    "values": (MAX_VALUES, "values in its enums and choices"),
    "branches": (MAX_BRANCHES, "subschemas in its lists (anyOf, oneOf, allOf, prefixItems)"),
    "repetitions": (MAX_ALL_REPETITIONS, "repetitions in its patterns"),
}


def _walk(value: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield level, key and value of all fields, including those of JSON in texts."""
    pending = [(0, value)]
    while pending:
        level, each = pending.pop()
        if isinstance(each, list):
            pending += ((level + 1, one) for one in each if isinstance(one, dict | list))
        elif isinstance(each, dict):
            for key, one in each.items():
                inner = _decoded(one) if key in _AS_TEXT and isinstance(one, str) else one
                yield level, key, inner
                if isinstance(inner, dict | list):
                    pending.append((level + 1, inner))


def _decoded(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # the engine reports the error
        return None


def _count(key: str, value: Any, counts: dict[str, int]) -> None:
    """Add what a field has of each entry of _MOST to `counts`."""
    if isinstance(value, str):
        if key in ("pattern", "regex", "grammar"):
            counts["repetitions"] += _repetitions(key, value)
    elif isinstance(value, Mapping):
        if key in _PROPERTIES:
            counts["properties"] += len(value)
        if key == "patternProperties":
            counts["repetitions"] += sum(_repetitions("pattern", name) for name in value)
    elif isinstance(value, list):
        if key in ("enum", "choice"):
            counts["values"] += len(value)
        elif key in _BRANCHES:
            counts["branches"] += len(value)


def _repetitions(key: str, pattern: str) -> int:
    number = repetitions(pattern)
    if key != "grammar" and number > MAX_REPETITIONS:
        raise _TooLarge(
            f"has a pattern whose repetitions come to {number}; give at most {MAX_REPETITIONS}"
        )
    return number


def repetitions(pattern: str) -> int:
    """Return the number of repeated parts that a regex or grammar has when it is expanded."""
    if "{" not in pattern:
        return 0
    # Repetitions of each open group, and of the part that was read last.
    groups, last = [0], 0
    for part in _PART.finditer(pattern):
        kind = part.lastgroup
        if kind == "open":
            groups.append(0)
            last = 0
        elif kind == "close":
            last = groups.pop() if len(groups) > 1 else 0
            groups[-1] += last
        elif kind is not None:
            times = max(_number(part["least"]), _number(part["most"] or "0"))
            product = min(times * max(1, last), _MANY)
            groups[-1] += product - last
            last = product
        elif not part[0].isspace():
            last = 0
    return sum(groups)


def _number(digits: str) -> int:
    return int(digits) if len(digits) < len(str(_MANY)) else _MANY
