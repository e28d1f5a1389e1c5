"""Which of pydantic's errors tells what is wrong: where a value may have several forms, it gives
those of all forms, and only one of them was meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

_PLAIN = frozenset(("str", "int", "float", "bool", "bytes", "dict", "list", "none"))
#: What pydantic says of a value that is no list, no text, or of another class altogether.
_OTHER_FORM = ("_type", "_parsing", "is_instance_of")
#: The fields by which a form is told.
_TELLS = ("type", "role")

Error = Mapping[str, Any]


def told(error: pydantic.ValidationError, body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field that is wrong, with its whole path in the body, and what is wrong with it.

    Args:
        error: as one of vLLM's forms raised it.
        body: the request's.
    """
    errors: Sequence[Error] = error.errors(include_url=False)
    found = min(errors, key=lambda one: _off(one, errors))
    path = [str(part) for part in found["loc"] if not _is_form(part)]
    if path and path[0].isdigit():  # of a message's content, whose parts vLLM reads one by one
        path = [*_where(errors, int(path[0]), body), *path]
    message = found["msg"]
    if _tells_form(found):  # of no form: all that there are
        same = [one for one in errors if _tells_form(one) and _depth(one) == _depth(found)]
        kinds = dict.fromkeys(str(one["ctx"]["expected"]) for one in same)
        message = f"Input should be {', '.join(kinds)}"
    return ".".join(path), message


def _is_form(part: object) -> bool:
    """Whether a part of a path names one of several forms, and no field or index."""
    text = str(part)
    return isinstance(part, str) and (text[:1].isupper() or "[" in text or text in _PLAIN)


def _forms(error: Error) -> tuple[str, ...]:
    return tuple(str(part) for part in error["loc"] if _is_form(part))


def _depth(error: Error) -> int:
    return sum(not _is_form(part) for part in error["loc"])


def _tells_form(error: Error) -> bool:
    return error["type"] == "literal_error" and error["loc"][-1] in _TELLS


def _off(error: Error, errors: Sequence[Error]) -> tuple[bool, int, bool, int, bool]:
    """Return how far the form of an error is from the one that was meant: one of another type of
    value, one that ends to fit early, one of another kind."""
    forms = _forms(error)
    around = [one for one in errors if forms[: len(_forms(one))] == _forms(one)]
    other = any(
        _is_form(one["loc"][-1]) and one["type"].endswith(_OTHER_FORM)
        for one in around
        if one["loc"]
    )
    unlike = any(_tells_form(one) for one in around)
    lacks = [_depth(one) for one in around if _tells_form(one) or one["type"] == "missing"]
    fits = min(lacks, default=_depth(error))
    return other, -fits, unlike, unlike * -_depth(error), unlike and not _tells_form(error)


def _where(errors: Sequence[Error], index: int, body: Mapping[str, Any]) -> list[str]:
    """Return the path to the content that has the part of an index which some errors are about."""
    inputs = [one["input"] for one in errors]
    for number, message in enumerate(body.get("messages") or ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and len(content) > index:
            part = content[index]
            values = list(part.values()) if isinstance(part, Mapping) else []
            if any(one in (part, *values) for one in inputs):
                return ["messages", str(number), "content"]
    return []
