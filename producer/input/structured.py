"""Converts the options for structured answers: a list of allowed texts, or a JSON schema."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from contract.errors import RequestRejected
from contract.openai.structured import refuse_large
from producer.input.formats import binary_format
from producer.input.options import BadOption

#: The field that the options set.
_FIELD = "structured_outputs"
#: Fields that constrain an answer as well, so that only one of them may be set.
_EXCLUSIVE = (_FIELD, "response_format", "text", "output_config")
#: Keys of OpenAI's wrappers around a schema.
_WRAPPERS = ("json_schema", "schema")
#: A schema as an object, as the file that has it, or as a class of pydantic's.
Schema = Mapping[str, Any] | str | os.PathLike[str] | type


def with_structure(
    fields: Mapping[str, Any],
    choice: str | Iterable[str] | None,
    schema: Schema | None,
    prefix: str = "",
) -> dict[str, Any]:
    """Return the fields of all lines, with those for the allowed texts or the schema of answers.

    `prefix` precedes the options' names in errors. Raises BadOption.
    """
    if choice is None and schema is None:
        return dict(fields)
    option = f"{prefix}choice" if schema is None else f"{prefix}schema"
    if choice is not None and schema is not None:
        raise BadOption(f"{prefix}choice and {prefix}schema exclude each other: give one")
    if conflicting := [name for name in _EXCLUSIVE if fields.get(name) is not None]:
        raise BadOption(f"{option}: {conflicting[0]} is set for all lines as well; leave one out")
    value: dict[str, Any] = {}
    if choice is not None:
        value["choice"] = _texts(choice, option)
    if schema is not None:
        value["json"] = _object(schema, option)
    try:
        refuse_large(_FIELD, value, "")
    except RequestRejected as error:
        raise BadOption(f"{option}: {error.message.partition(': ')[2]}") from None
    return {**fields, _FIELD: value}


def _texts(choice: str | Iterable[str], option: str) -> list[str]:
    """Return the allowed texts; a text `choice` lists them, as `good,bad` or as a JSON list."""
    texts = _split(choice) if isinstance(choice, str) else list(choice)
    if not texts:
        raise BadOption(f"{option}: no answer is given; give texts, for example good,bad")
    earlier: set[str] = set()
    for text in texts:
        if not isinstance(text, str) or not text:
            kind = "is empty" if text == "" else f"{text!r} is not a text"
            raise BadOption(f"{option}: an answer {kind}; give texts, for example good,bad")
        if text in earlier:
            raise BadOption(f"{option}: {text!r} is given twice; give each answer once")
        earlier.add(text)
    return texts


def _split(text: str) -> list[Any]:
    if text.startswith("["):
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            value = None
        if isinstance(value, list):
            return value
    return [part.strip() for part in text.split(",")]


def _object(schema: Schema, option: str) -> dict[str, Any]:
    """Return a schema as an object."""
    name = ""
    if isinstance(schema, str | os.PathLike):
        name = os.fspath(schema)
        found = _read(name, option)
    elif hasattr(schema, "model_json_schema"):
        found = schema.model_json_schema()
    else:
        found = dict(schema) if isinstance(schema, Mapping) else schema
    place = f"{option} {name}".rstrip()
    if not isinstance(found, dict):
        raise BadOption(f'{place}: it is not a JSON object such as {{"type": "object", ...}}')
    if wrapper := next((key for key in _WRAPPERS if isinstance(found.get(key), dict)), ""):
        raise BadOption(f"{place}: the schema is inside its field {wrapper!r}; give only that")
    try:
        orjson.dumps(found)
    except TypeError as error:
        raise BadOption(f"{place}: cannot be written as JSON: {error}") from None
    return found


def _read(name: str, option: str) -> Any:
    try:
        content = Path(name).read_bytes()
    except OSError as error:
        raise BadOption(f"{option} {name}: cannot be read: {error.strerror}") from None
    if remedy := binary_format(name, content):
        raise BadOption(f"{option} {name}: {remedy}")
    try:
        return orjson.loads(content.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        raise BadOption(
            f"{option} {name}: line {error.lineno}, character {error.colno}: not valid JSON: "
            f"{error.msg}"
        ) from None
