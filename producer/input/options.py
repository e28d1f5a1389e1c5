"""Checks a submit's options before the input is read."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from contract.errors import RequestRejected, WarmqError
from contract.naming import did_you_mean
from contract.openai.body import BODY_TYPES, min_body
from contract.openai.fields import known_names
from contract.openai.former_names import remedy_for_name
from contract.openai.lines import check_body

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
#: Fields that are each the content of a request; a request has one of them.
WHOLE_REQUESTS = frozenset({"prompt", "messages", "input"})


class BadOption(WarmqError):
    """An option of a submit is invalid; the message names it and its valid values."""

    code = "bad_option"


def check_name(what: str, name: str) -> None:
    """Raise BadOption for a name that cannot be part of a Redis key."""
    if not _NAME.fullmatch(name):
        raise BadOption(
            f"{what} {name[:140]!r}: use 1 to 128 letters, digits, `.`, `_` or `-`, beginning with "
            "a letter or digit"
        )


def field_value(name: str, text: str) -> Any:
    """Return a text as a value of a body's field: as JSON if that is valid, otherwise as text.

    Raises BadOption, which begins with the name.
    """
    try:
        values = [orjson.loads(text), text]
    except orjson.JSONDecodeError:
        values = [text]
    return _valid_value(name, values, _urls_of(name, values[0]))


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise BadOption for a field of all bodies that no endpoint takes. A null removes a field."""
    set_fields = {name: value for name, value in fields.items() if value is not None}
    for name, value in set_fields.items():
        try:
            urls = _urls_of(name, value)
            if all(_refusal(url, set_fields) for url in urls):
                _valid_value(name, [value], urls)
        except BadOption as error:
            raise BadOption(f"fields {error.message.removeprefix('field ')}") from None


def _urls_of(name: str, value: Any) -> list[str]:
    """Return the endpoints that have a field; raise BadOption if there are none."""
    urls = [url for url in BODY_TYPES if name in known_names(url)]
    if not urls:
        if remedy := remedy_for_name(name, value=value):
            raise BadOption(f"{name}: {remedy}")
        names = sorted(set().union(*(known_names(url) for url in BODY_TYPES)))
        hint = did_you_mean(name, names)
        raise BadOption(f"{name}: unknown to any of {', '.join(BODY_TYPES)}{hint}")
    return urls


def _valid_value(name: str, values: Iterable[Any], urls: Iterable[str]) -> Any:
    """Return the first value that an endpoint takes; raise BadOption if there is none."""
    reason = ""
    for value in values:
        for url in urls:
            if not (refusal := _refusal(url, {name: value})):
                return value
            reason = reason or refusal
    raise BadOption(reason)


def _refusal(url: str, fields: Mapping[str, Any]) -> str:
    """Return why an endpoint refuses the smallest body with these fields, '' if it takes it."""
    try:
        check_body(url, {**min_body(url), **fields}, "")
    except RequestRejected as error:
        return error.message
    return ""


def check_field_conflicts(
    fields: Iterable[str], columns: Iterable[str], names: tuple[str, str]
) -> None:
    """Raise BadOption for a field with both a value for all requests and a column.

    `names` are the names of the two options, for errors. `messages` and `messages.user` count as
    one field; prompt, messages and input exclude each other.
    """
    mapped = {column.partition(".")[0] for column in columns}
    for name in fields:
        both = name in mapped
        if both or (name in WHOLE_REQUESTS and mapped & WHOLE_REQUESTS):
            other = name if both else min(mapped & WHOLE_REQUESTS)
            raise BadOption(
                f"{names[0]} {name}: {names[1]} gives {other} to each row already; leave one out"
            )


def check_column_conflicts(fields: Mapping[str, Any], source: object, name: str) -> None:
    """Raise BadOption for a field in both option `name` and a table's columns.

    A null removes the field, and is not a conflict.
    """
    names = [field for field, value in fields.items() if value is not None]
    check_field_conflicts(names, getattr(source, "fields", ()), (name, "a column"))
