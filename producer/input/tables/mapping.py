"""Converts a table's rows to requests, by columns and templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from contract.errors import RequestRejected
from contract.naming import did_you_mean
from contract.openai.body import BODY_TYPES, min_body
from contract.openai.fields import known_names
from contract.openai.lines import check_body
from contract.openai.pooling import EMBEDDINGS_URL
from producer.input.iterable import bad_row
from producer.input.options import WHOLE_REQUESTS, BadOption
from producer.input.tables.cells import (
    JSON,
    BadCell,
    as_cells,
    empty,
    list_or_object,
    not_json,
    parsed,
    plain,
    text_of,
    texts_or_json,
    value_of,
)

#: A row: the cells by column name.
Row = Mapping[str, Any]
#: Function that returns a field's value in one row, None for no field, or raises BadCell.
_Get = Callable[[Row], Any]

#: Pattern of a template: `{{` and `}}` are braces, `{name}` is a column, any other brace an error.
_PART = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")
_MESSAGES = "messages."
_ROLES = ("system", "developer", "user", "assistant")
#: Fields of an OpenAI batch line, which has its request in `body`.
_LINE_FIELDS = ("custom_id", "method", "url", "body")
#: Fields whose values are always texts.
_TEXTS = frozenset(("custom_id", "method", "url"))
#: Fields whose cells are a plain text, or a JSON list or object: `["a", "b"]` are two stops. A
#: prompt is not one of them: it may begin with a bracket.
_TEXTS_OR_JSON = frozenset(("stop", "tool_choice", "input"))
#: Fields of which a mapping needs one, with a value in each row; other fields may be empty.
_NEEDED = frozenset(("prompt", "messages", "input", "body"))
_EXAMPLE = "map a field to one, for example prompt=text or messages.user='Summarise: {text}'"
#: Most names that an error message lists.
_SHOWN = 12
#: Separators of cells other than a comma, and their names in messages.
_SEPARATORS = {";": ";", "|": "|", "\t": "tabs"}


def is_template(text: str) -> bool:
    """Whether a text names columns in braces."""
    return any(found[1] for found in _PART.finditer(text))


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: its texts, and the columns between them."""

    texts: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, field: str, text: str) -> Template:
        """Parse the template of a field; raise BadOption for a single brace."""
        texts, columns, at = [""], [], 0
        for found in _PART.finditer(text):
            texts[-1] += text[at : found.start()]
            at = found.end()
            if found[1]:
                columns.append(found[1])
                texts.append("")
            elif len(found[0]) == 2:
                texts[-1] += found[0][0]
            else:
                raise BadOption(
                    f"template of {field}: a single {found[0]} at character {found.start() + 1}; "
                    f"write {found[0] * 2} for a brace, {{column}} for a column"
                )
        texts[-1] += text[at:]
        return cls(tuple(texts), tuple(columns))

    def fill(self, row: Row) -> str:
        """Return the text of one row; raise BadCell for an empty column."""
        parts = [self.texts[0]]
        for column, text in zip(self.columns, self.texts[1:], strict=True):
            parts += (text_of(column, row.get(column)), text)
        return "".join(parts)


class RowMapping:
    """Converts rows to lines of an input file.

    `pairs` maps each field to a column or template; without pairs, each column is the field of its
    name. `columns` are the table's columns, None if unknown. A field is a field of a request's
    body, `custom_id`, or `messages.user` (`.system`, `.assistant`) for one message of a chat; the
    messages are in the order of `pairs`. With `input` alone the request is an embedding.

    Raises BadOption, which names the field or the missing column.
    """

    def __init__(self, pairs: Mapping[str, str], columns: Sequence[str] | None = None) -> None:
        if not pairs:
            pairs = _same_names(columns or ())
        self._gets: list[tuple[str, _Get]] = []
        self._messages: list[tuple[str, _Get]] = []
        #: The columns of each field, for error messages.
        self.columns: dict[str, str] = {}
        wanted: dict[str, None] = {}
        for field, given in pairs.items():
            get, used = _get_of(field, given, columns)
            wanted |= dict.fromkeys(used)
            if field.startswith(_MESSAGES):
                role = field.removeprefix(_MESSAGES)
                if role not in _ROLES:
                    raise BadOption(f"field {field}: give one of {_listed(_MESSAGES, _ROLES)}")
                self._messages.append((role, get))
                before = self.columns.get("messages")
                self.columns["messages"] = ", ".join(filter(None, (before, *used)))
            else:
                self._gets.append((field, get))
                self.columns[field] = ", ".join(used)
        self._gets.sort(key=lambda pair: pair[0] != "custom_id")  # so that a bad row's error has it
        if self._messages and "messages" in pairs:
            raise BadOption("field messages: given as a whole and by roles; give it one way")
        if len(whole := sorted(WHOLE_REQUESTS & self.columns.keys())) > 1:
            raise BadOption(f"fields {' and '.join(whole)}: each is a whole request; give one")
        needed = _NEEDED & self.columns.keys()
        if not needed:
            raise BadOption(f"no column has the request; {_EXAMPLE}")
        self._url = EMBEDDINGS_URL if needed == {"input"} else ""
        #: The columns to read.
        self.wanted = list(wanted)

    def line_of_values(self, row: Any) -> bytes:
        """Return the line of a row whose values are Python's, pandas' or numpy's."""
        return self.line(as_cells(row, self.wanted) if isinstance(row, Mapping) else row)

    def line(self, row: Any) -> bytes:
        """Return the line of a row; for a bad row, the line with its error (`bad_row`)."""
        if not isinstance(row, Mapping):
            return bad_row(f"must be a dict with the columns, not {type(row).__name__}")
        request: dict[str, Any] = {}
        try:
            for field, get in self._gets:
                value = get(row)
                if value is not None:
                    request[field] = value
            if self._messages:
                request["messages"] = [
                    {"role": role, "content": get(row)} for role, get in self._messages
                ]
        except BadCell as error:
            return bad_row(error.problem, error.column, request.get("custom_id"))
        if self._url:
            own = {"custom_id": request.pop("custom_id")} if "custom_id" in request else {}
            request = own | {"url": self._url, "body": request}
        try:
            return orjson.dumps(request, plain, JSON | orjson.OPT_APPEND_NEWLINE)
        except TypeError:
            cell = not_json({column: row.get(column) for column in self.wanted})
            return bad_row(cell.problem, cell.column, request.get("custom_id"))


def _same_names(columns: Sequence[str]) -> dict[str, str]:
    """Return a mapping of each column to the field of the same name."""
    fields = _body_fields().union(_LINE_FIELDS)
    unknown = [column for column in columns if column not in fields]
    if not columns:
        raise BadOption("the table has no columns; give another")
    if unknown:
        raise BadOption(
            f"columns without a field of their name: {_listed('', unknown)}; {_EXAMPLE}"
            f"{_csv_remedy(columns)}"
        )
    return {column: column for column in columns}


def _get_of(field: str, given: str, columns: Sequence[str] | None) -> tuple[_Get, tuple[str, ...]]:
    """Return the getter of a field's value, and the columns that it reads."""
    if not field.startswith(_MESSAGES) and field not in _LINE_FIELDS:
        fields = _body_fields()
        if field not in fields:
            near = did_you_mean(field, [*fields, *_LINE_FIELDS])
            raise BadOption(f"field {field}: not a field of a request{near}")
    if (columns is None or given not in columns) and is_template(given):
        template = Template.parse(field, given)
        for column in template.columns:
            _check_column(field, column, columns)
        return template.fill, template.columns
    _check_column(field, given, columns)
    return _column(field, given), (given,)


def _check_column(field: str, column: str, columns: Sequence[str] | None) -> None:
    if columns is None:
        return
    if column not in columns:
        near = did_you_mean(column, columns)
        raise BadOption(
            f"field {field}: there is no column {column!r}{near}; there are {_listed('', columns)}"
            f"{_csv_remedy(columns)}"
        )
    if columns.count(column) > 1:
        raise BadOption(f"field {field}: there are two columns {column!r}; rename one")


def _csv_remedy(columns: Sequence[str]) -> str:
    """Return the remedy for a header without commas between its cells; otherwise ''."""
    first = columns[0] if columns else ""
    if first.startswith("sep="):
        mark = first[len("sep=") :] or ","
        return f"; remove the file's first line, sep={mark}, and separate cells by commas"
    found = [mark for mark in _SEPARATORS if mark in first] if len(columns) == 1 else []
    return f"; cells are separated by {_SEPARATORS[found[0]]}: write commas" if found else ""


def _column(field: str, column: str) -> _Get:
    """Return the getter of a field from a column."""
    convert = _converter(field, column)
    needed = field in _NEEDED or field.startswith(_MESSAGES)

    def get(row: Row) -> Any:
        value = row.get(column)
        found = None if value is None or value_of(column, value) is None else convert(value)
        if found is None and needed:
            raise empty(column)
        return found

    return get


def _converter(field: str, column: str) -> Callable[[Any], Any]:
    """Return the conversion of a cell to a field's value."""
    if field in _TEXTS or field.startswith(_MESSAGES):
        return partial(text_of, column)
    if field in _TEXTS_OR_JSON:
        # An `input` may be a text that begins with a bracket and is not JSON, for example code.
        as_json = list_or_object if field == "input" else texts_or_json
        return lambda value: as_json(column, value_of(column, value))
    if _accepts_text(field):
        return partial(value_of, column)
    return lambda value: parsed(column, value_of(column, value))


def _accepts_text(field: str) -> bool:
    """Whether a plain text is a valid value of the field."""
    for url in BODY_TYPES:
        if field in known_names(url):
            try:
                check_body(url, min_body(url) | {field: "x"}, "")
            except RequestRejected:
                continue
            return True
    return False


def _body_fields() -> set[str]:
    return set().union(*(known_names(url) for url in BODY_TYPES))


def _listed(prefix: str, names: Sequence[str]) -> str:
    shown = ", ".join(f"{prefix}{name}" for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
