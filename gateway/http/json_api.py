"""Reads and writes JSON bodies; makes ids; returns a request's caller and page size."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from contract.openai.decode import SHALLOW, int_if_whole_at, may_be_too_deep
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, invalid
from gateway.http.services import Services

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
#: Matches the place of an error in a message of msgspec.
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
#: Matches the place of a float that should be an integer; _STEP matches its keys and indexes.
_FLOAT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$([^`]*)`$")
_STEP = re.compile(r"[^.\[\]]+|(?<=\[)\.\.\.(?=\])")


def services(request: Request) -> Services:
    """Return the gateway's connections and settings."""
    found: Services = request.app.state.services
    return found


def caller(request: Request) -> Caller:
    """Return the caller that auth.py found."""
    found: Caller = request.scope["warmq.caller"]
    return found


def new_id(prefix: str) -> str:
    """Return a new id such as `file-…`, with 24 hexadecimal digits after the prefix."""
    return prefix + secrets.token_hex(12)


def id_of(prefix: str, name: str) -> str:
    """Return an id like those of `new_id`, the same one for the same name."""
    return prefix + hashlib.sha256(name.encode()).hexdigest()[:24]


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response; fields that are UNSET are left out."""
    return Response(_encode(value), status, headers, "application/json")


def read(body: bytes, shape: type[T]) -> T:
    """Decode a JSON body to a type; raise ApiError (400) with the wrong field."""
    try:
        found = _decoded(body or b"{}", shape)
        if len(body) > SHALLOW and may_be_too_deep(body):
            orjson.loads(body)
        return found
    except msgspec.ValidationError as error:
        text, path = str(error), _PATH.search(str(error))
        field = path[1].removesuffix("[...]") or None if path else None
        if path:
            text = text[: path.start()]
        if "missing required field" in text:
            name = text.split("`")[1]
            field = f"{field}.{name}" if field else name
            message = f"{field} is missing; add it to the body"
            raise invalid(message, field, "missing_required_parameter") from None
        raise invalid(f"{field}: {text}" if field else text, field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    except (RecursionError, orjson.JSONDecodeError):
        message = "the body is nested too deeply; make it flatter"
        raise ApiError(400, message, code="invalid_json") from None


def _decoded(body: bytes, shape: type[T]) -> T:
    """Decode a body; 16.0 is accepted as an integer, as in the bodies of requests."""
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        problem, previous = error, ""
    value = msgspec.json.decode(body)
    while previous != str(problem) and (found := _FLOAT.search(str(problem))):
        previous = str(problem)
        value = int_if_whole_at(value, _STEP.findall(found[1]))
        try:
            return msgspec.convert(value, shape)
        except msgspec.ValidationError as error:
            problem = error
    raise problem


def page_limit(text: str | None, default: int, most: int) -> int:
    """Return the page size of a query's `limit`; raise ApiError (400) if it is wrong."""
    if text is None:
        return default
    try:
        limit = int(text) if len(text) < 20 else most + 1
    except ValueError:
        message = f"limit is {text[:40]!r}; use an integer from 1 to {most}"
        raise invalid(message, "limit", "invalid_type") from None
    if limit > most:
        message = f"limit is {text[:40]}; use at most {most}"
        raise invalid(message, "limit", "integer_above_max_value")
    if limit < 1:
        raise invalid(f"limit is {limit}; use at least 1", "limit", "integer_below_min_value")
    return limit
