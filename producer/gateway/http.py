"""Requests and responses: JSON both ways, ids, who calls."""

from __future__ import annotations

import re
import secrets
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from producer.gateway.caller import Caller
from producer.gateway.errors import ApiError, invalid
from producer.gateway.services import Services

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
#: Where in a body msgspec has found something wrong.
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


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


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response; msgspec structs leave out what is UNSET."""
    return Response(_encode(value), status, headers, "application/json")


def read(body: bytes, shape: type[T]) -> T:
    """Read a JSON body.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=shape)
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
