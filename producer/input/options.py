"""What an option may say, checked before anything is read."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from contract.errors import WarmqError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class BadOption(WarmqError):
    """An option of a submit is wrong; the message names it and says what it takes."""

    code = "bad_option"


def check_name(what: str, name: str) -> None:
    """Raise BadOption for a name that cannot be part of a Redis key."""
    if not _NAME.fullmatch(name):
        raise BadOption(
            f"{what} {name[:140]!r}: use 1 to 128 letters, digits, `.`, `_` or `-`, beginning with "
            "a letter or digit"
        )


#: Fields that each say by themselves what is asked.
WHOLE_REQUESTS = frozenset({"prompt", "messages", "input"})


def check_field_conflicts(
    fields: Iterable[str], columns: Iterable[str], names: tuple[str, str]
) -> None:
    """Refuse a field that a value for all requests and a column would both give.

    `names` are the options of the two: that of the values, that of the columns.

    Raises:
        BadOption: naming the field. `messages` and `messages.user` are one field, and a prompt,
            messages or an input are each a whole request.
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
    """Refuse a field that a value for all requests and a table's column of its name would both
    give; null takes a field out. `name` is the option of the values.

    Raises:
        BadOption: naming the field.
    """
    given = [field for field, value in fields.items() if value is not None]
    check_field_conflicts(given, getattr(source, "fields", ()), (name, "a column"))
