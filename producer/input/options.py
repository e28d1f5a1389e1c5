"""Checks a submit's options before the input is read."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from contract.errors import WarmqError

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
    given = [field for field, value in fields.items() if value is not None]
    check_field_conflicts(given, getattr(source, "fields", ()), (name, "a column"))
