"""Converts a table's rows to requests, by columns and templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from contract.errors import RequestRejected
from contract.naming import did_you_mean, nearest
from contract.openai.body import BODY_TYPES, min_body
from contract.openai.fields import known_names
from contract.openai.former_names import remedy_for_name
from contract.openai.lines import check_body
from contract.openai.pooling import EMBEDDINGS_URL
from producer.input.iterable import bad_row
from producer.input.options import WHOLE_REQUESTS, BadOption, field_value
from producer.input.tables.cells import (
    JSON,
    BadCell,
    as_cells,
    empty,
    list_object_or_null,
    list_or_object,
    not_json,
    parsed,
    plain,
    text_of,
    texts_or_json,
    value_of,
)
from producer.input.tables.kept import KeptColumns, listed

#: A row: the cells by column name.
Row = Mapping[str, Any]
#: Function that returns a field's value in one row, None for no field, or raises BadCell.
_Get = Callable[[Row], Any]

#: Pattern of a template: `{{` and `}}` are braces, `{name}` is a column, any other brace an error.
_PART = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")
#: The remedy for braces in a template that are not meant as a column's.
_BRACES = "; write {{ and }} for braces"
_MESSAGES = "messages."
_ROLES = ("system", "developer", "user", "assistant")
#: Fields of an OpenAI batch line, which has its request in `body`.
_LINE_FIELDS = ("custom_id", "method", "url", "body")
#: Fields whose values are always texts.
_TEXTS = frozenset(("custom_id", "method", "url"))
#: Fields whose cells are a plain text, or a JSON list or object: `["a", "b"]` means two stops.
#: `prompt` is not in this set, because a prompt may begin with a bracket.
_TEXTS_OR_JSON = frozenset(("stop", "tool_choice", "input"))
#: Fields of which a mapping needs one, with a value in each row; other fields may be empty.
_NEEDED = frozenset(("prompt", "messages", "input", "body"))
#: Fields that ask something: a text without a character is as an empty cell.
_ASKING = frozenset(("prompt", "input", "messages.user"))
#: A constant is refused if its similarity to a column's name (difflib's ratio) is at least this:
#: for one word, and for any other text.
_NEAR_WORD, _NEAR_TEXT = 0.6, 0.8
PROMPT_EXAMPLE = "map a field to one, for example prompt=text or messages.user='Summarise: {text}'"
#: Values of JSON that are neither texts, lists nor objects. A field's bound may exclude 0 or 1.
_SCALARS = (0, 1, 0.5, True)


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: its texts, and the columns between them.

    With `asks`, a row without a character in all columns is refused: it would ask nothing.
    """

    texts: tuple[str, ...]
    columns: tuple[str, ...]
    asks: bool = False

    @classmethod
    def parse(cls, field: str, text: str) -> Template:
        """Parse the template of a field; raise BadOption for a single brace."""
        texts, columns, at = [""], [], 0
        for match in _PART.finditer(text):
            texts[-1] += text[at : match.start()]
            at = match.end()
            if match[1]:
                columns.append(match[1])
                texts.append("")
            elif len(match[0]) == 2:
                texts[-1] += match[0][0]
            else:
                raise BadOption(
                    f"template of {field}: a single {match[0]} at character {match.start() + 1}; "
                    f"write {match[0] * 2} for a brace, {{column}} for a column"
                )
        texts[-1] += text[at:]
        return cls(tuple(texts), tuple(columns), field in _ASKING)

    def fill(self, row: Row) -> str:
        """Return the text of one row; raise BadCell for an empty column."""
        cells = [text_of(column, row.get(column)) for column in self.columns]
        if self.asks and not any(cells):
            raise empty(", ".join(self.columns))
        parts = zip(cells, self.texts[1:], strict=True)
        return self.texts[0] + "".join(cell + text for cell, text in parts)


class RowMapping:
    """Converts rows to lines of an input file.

    `pairs` maps each field to a column, a template or a constant (any other text); without pairs,
    each column is the field of its name. `columns` are the table's columns, None if unknown.
    With `guessed`, only the first row was read for them. A field is a field of a request's body,
    `custom_id`, or `messages.user` (`.system`, `.assistant`) for one message of a chat: first the
    system's, then the rest in the order of `pairs`. With `input` alone it is an embedding.

    Raises BadOption, which names the field or the missing column.
    """

    def __init__(
        self,
        pairs: Mapping[str, str],
        columns: Sequence[str] | None = None,
        keep: Sequence[str] = (),
        *,
        guessed: bool = False,
    ) -> None:
        pairs = pairs or _map_same_names(columns or ())
        #: Constant -> its field, if a later row may have a column of that name.
        self._guesses: dict[str, str] = {}
        self._gets: list[tuple[str, _Get]] = []
        self._messages: list[tuple[str, _Get]] = []
        #: The columns of each field, for error messages; a constant has none.
        self.columns: dict[str, str] = {}
        wanted: dict[str, None] = {}
        for field, given in pairs.items():
            get, used = _get_of(field, given, columns, guessed=guessed)
            wanted |= dict.fromkeys(used)
            if guessed and not used:
                self._guesses[given] = field
            if field.startswith(_MESSAGES):
                role = field.removeprefix(_MESSAGES)
                if role not in _ROLES:
                    roles = listed([_MESSAGES + role for role in _ROLES])
                    raise BadOption(f"field {field}: give one of {roles}")
                self._messages.insert(0 if role == "system" else len(self._messages), (role, get))
                before = self.columns.get("messages")
                self.columns["messages"] = ", ".join(filter(None, (before, *used)))
            else:
                self._gets.append((field, get))
                self.columns[field] = ", ".join(used)
        # The custom_id is read first, so that the error of a bad row has it.
        self._gets.sort(key=lambda pair: pair[0] != "custom_id")
        self._check_request(pairs, columns, wanted)
        needed = _NEEDED & self.columns.keys()
        self._url = {"url": EMBEDDINGS_URL} if needed == {"input"} else {}
        #: Whether the fields are those of a body, next to a url.
        self._in_body = "body" not in needed and bool(self._url or "url" in pairs)
        #: The column that is the custom_id as it stands; '' for a template or none.
        self.custom_id = pairs.get("custom_id", "")
        if self.custom_id != self.columns.get("custom_id"):
            self.custom_id = ""
        # An output has a column custom_id anyway.
        self.kept = KeptColumns.of(keep, columns, without={"custom_id"} & {self.custom_id})
        #: The columns to read.
        self.wanted = list(wanted | dict.fromkeys(self.kept.names))
        #: The columns that are neither used nor kept.
        self.unused = [column for column in columns or () if column not in self.wanted]

    def _check_request(
        self, pairs: Mapping[str, str], columns: Sequence[str] | None, used: Collection[str]
    ) -> None:
        """Raise BadOption if the fields are not one request, or if no column is used for it."""
        if self._messages and "messages" in pairs:
            raise BadOption("field messages: given as a whole and by roles; give it one way")
        if len(whole := sorted(WHOLE_REQUESTS & self.columns.keys())) > 1:
            raise BadOption(f"fields {' and '.join(whole)}: each is a whole request; give one")
        needed = _NEEDED & self.columns.keys()
        if not needed:
            raise _no_prompt([one for one in columns or () if one not in used])
        if not any(self.columns[field] for field in needed):
            field = next(name for name in pairs if name.partition(".")[0] in needed)
            raise _no_column(field, pairs[field], columns or ())
        if self.columns.get("custom_id") == "":
            raise _no_column("custom_id", pairs["custom_id"], columns or ())

    def line_of_values(self, row: Any) -> bytes:
        """Return the line of a row whose values are Python's, pandas' or numpy's."""
        for text, field in self._guesses.items():
            if isinstance(row, Mapping) and text in row:
                problem = (
                    f"is not in the first row, so field {field} is the constant {text!r} in all "
                    "rows; give the first row this column too"
                )
                return self.kept.after(bad_row(problem, text), {})
        return self.line(as_cells(row, self.wanted) if isinstance(row, Mapping) else row)

    def line(self, row: Any) -> bytes:
        """Return the line of a row; for a bad row, the line with its error (`bad_row`)."""
        if not isinstance(row, Mapping):
            problem = f"must be a dict with the columns, not {type(row).__name__}"
            return self.kept.after(bad_row(problem), {})
        return self.kept.after(self._request(row), row)

    def _request(self, row: Row) -> bytes:
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
        if self._in_body:
            own = {name: request.pop(name) for name in _LINE_FIELDS if name in request}
            request = self._url | own | {"body": request}
        try:
            return orjson.dumps(request, plain, JSON | orjson.OPT_APPEND_NEWLINE)
        except TypeError:
            cell = not_json({column: row.get(column) for column in self.wanted})
            return bad_row(cell.problem, cell.column, request.get("custom_id"))


def _map_same_names(columns: Sequence[str]) -> dict[str, str]:
    """Return a mapping of each field to the column of the same name, where there is one."""
    fields = _body_fields().union(_LINE_FIELDS)
    if not columns:
        raise BadOption("the table has no columns; give another table")
    same = {column: column for column in columns if column in fields}
    if not same.keys() & _NEEDED:
        raise _no_prompt(columns)
    return same


def _no_prompt(unused: Sequence[str]) -> BadOption:
    """Return the error for rows without a prompt; `unused` columns may have it."""
    columns = f"; unused columns: {listed(unused)}" if unused else ""
    return BadOption(f"there is no prompt{columns}; {PROMPT_EXAMPLE}")


def _get_of(
    field: str, given: str, columns: Sequence[str] | None, *, guessed: bool
) -> tuple[_Get, tuple[str, ...]]:
    """Return the getter of a field's value, and the columns that it reads."""
    if not field.startswith(_MESSAGES) and field not in _LINE_FIELDS:
        fields = _body_fields()
        if field not in fields:
            near = did_you_mean(field, [*fields, *_LINE_FIELDS])
            problem = remedy_for_name(field) or f"not a field of a request{near}"
            raise BadOption(f"field {field}: {problem}")
    if columns is None or given not in columns:
        template = Template.parse(field, given)
        for column in template.columns:
            _check_column(field, column, None if guessed else columns, _BRACES)
        if template.columns:
            return template.fill, template.columns
        if columns is not None and not (guessed and field in _NEEDED):
            try:
                return _constant(field, given, template.texts[0], columns), ()
            except BadOption:
                if not guessed or field.startswith(_MESSAGES):
                    raise
    _check_column(field, given, None if guessed else columns)
    return _column(field, given), (given,)


def _constant(field: str, given: str, text: str, columns: Sequence[str]) -> _Get:
    """Return the getter of a value that is the same in all rows.

    Raises BadOption for a text that resembles a column's name, or is no value of the field.
    """
    if nearest(given, columns, _NEAR_WORD if given.isidentifier() else _NEAR_TEXT):
        raise _no_column(field, given, columns)
    value: Any = text
    if field in _LINE_FIELDS:
        if text not in (*BODY_TYPES, "POST"):
            raise _no_column(field, given, columns)
    elif not field.startswith(_MESSAGES):
        try:
            value = field_value(field, text)
        except BadOption as error:
            raise _no_column(field, given, columns, f"; as a constant: {error.message}") from None
    return lambda row: value


def _no_column(field: str, given: str, columns: Sequence[str], more: str = "") -> BadOption:
    near = did_you_mean(given, columns)
    return BadOption(
        f"field {field}: there is no column {given!r}{near}; there are {listed(columns)}{more}"
    )


def _check_column(field: str, column: str, columns: Sequence[str] | None, remedy: str = "") -> None:
    if columns is None:
        return
    if column not in columns:
        raise _no_column(field, column, columns, remedy)
    if columns.count(column) > 1:
        raise BadOption(f"field {field}: there are two columns {column!r}; rename one")


def _column(field: str, column: str) -> _Get:
    """Return the getter of a field from a column."""
    convert = _converter(field, column)
    needed = field in _NEEDED or field.startswith(_MESSAGES)

    def get(row: Row) -> Any:
        value = row.get(column)
        converted = None if value is None or value_of(column, value) is None else convert(value)
        if (converted is None and needed) or (converted == "" and field in _ASKING):
            raise empty(column)
        return converted

    return get


def _converter(field: str, column: str) -> Callable[[Any], Any]:
    """Return the function that converts a cell to a field's value."""
    if field in _TEXTS or field.startswith(_MESSAGES):
        return partial(text_of, column)
    if field in _TEXTS_OR_JSON:
        # An `input` may be a text that begins with a bracket and is not JSON, for example code.
        as_json = list_or_object if field == "input" else texts_or_json
        return lambda value: as_json(column, value_of(column, value))
    if _accepts(field, "x"):
        return partial(value_of, column)
    if any(_accepts(field, value) for value in _SCALARS):
        return lambda value: parsed(column, value_of(column, value))
    return lambda value: list_object_or_null(column, value_of(column, value))


def _accepts(field: str, value: Any) -> bool:
    """Whether a value is valid for the field at any endpoint."""
    for url in BODY_TYPES:
        if field in known_names(url):
            try:
                check_body(url, min_body(url) | {field: value}, "")
            except RequestRejected:
                continue
            return True
    return False


def _body_fields() -> set[str]:
    return set().union(*(known_names(url) for url in BODY_TYPES))
