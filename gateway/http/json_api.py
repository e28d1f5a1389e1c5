"""Requests and responses: JSON both ways, ids, who calls, pages of lists."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from contract.openai.decode import int_if_whole_at
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, invalid
from gateway.http.services import Services

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
#: Where in a body msgspec has found something wrong.
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")

#: Where a whole number was to be and a float was, and the keys and indexes that lead there.
_FLOAT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$([^`]*)`$")
_STEP = re.compile(r"[^.\[\]]+|(?<=\[)\.\.\.(?=\])")


def services(request: Request) -> Services:
    """Return what this gateway works with."""
    found: Services = request.app.state.services
    return found


def caller(request: Request) -> Caller:
    """Return who calls (auth.py has found out)."""
    found: Caller = request.scope["warmq.caller"]
    return found


def new_id(prefix: str) -> str:
    """Return a fresh id such as `file-…`, of 24 letters and digits after the prefix."""
    return prefix + secrets.token_hex(12)


def id_of(prefix: str, name: str) -> str:
    """Return an id like those of `new_id`, the same one for each time that a name is given."""
    return prefix + hashlib.sha256(name.encode()).hexdigest()[:24]


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response; msgspec structs leave out what is UNSET."""
    return Response(_encode(value), status, headers, "application/json")


def read(body: bytes, shape: type[T]) -> T:
    """Read a JSON body.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        return _decoded(body or b"{}", shape)
    except msgspec.ValidationError as error:
        text, path = str(error), _PATH.search(str(error))
        field = path[1].removesuffix("[...]") or None if path else None
        if path:
            text = text[: path.start()]
        if "missing required field" in text:
            field = f"{field}.{text.split('`')[1]}" if field else text.split("`")[1]
            told = f"{field} is missing; give it"
            raise invalid(told, field, "missing_required_parameter") from None
        raise invalid(f"{field}: {text}" if field else text, field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:  # msgspec passes over what no field asks for, too
        raise ApiError(
            400, "the body is nested too deep; make it flatter", code="invalid_json"
        ) from None


def _decoded(body: bytes, shape: type[T]) -> T:
    """Decode a body; 16.0 is a whole number, as in the bodies of requests."""
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        problem, told = error, ""
    value = msgspec.json.decode(body)
    while told != str(problem) and (found := _FLOAT.search(str(problem))):
        told = str(problem)
        value = int_if_whole_at(value, _STEP.findall(found[1]))
        try:
            return msgspec.convert(value, shape)
        except msgspec.ValidationError as error:
            problem = error
    raise problem


def page_limit(text: str | None, default: int, most: int) -> int:
    """Return how many objects a page is to have; `text` is the query's.

    Raises:
        ApiError: for what is no number from 1 to `most`.
    """
    if text is None:
        return default
    try:
        limit = int(text) if len(text) < 20 else most + 1
    except ValueError:
        told = f"limit is {text[:40]!r}; give a whole number from 1 to {most}"
        raise invalid(told, "limit", "invalid_type") from None
    if limit > most:
        told = f"limit is {text[:40]}; give at most {most}"
        raise invalid(told, "limit", "integer_above_max_value")
    if limit < 1:
        raise invalid(f"limit is {limit}; give at least 1", "limit", "integer_below_min_value")
    return limit
