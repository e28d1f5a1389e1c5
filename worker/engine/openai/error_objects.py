"""Errors in the body of a 200: which status they mean, in the server's own words."""

from collections.abc import Collection
from typing import Any

import orjson

from worker.engine.openai.retries import Unanswered

Json = dict[str, Any]

#: A code or a type in words, without case and underscores, and the status that it stands for. The
#: first that fits counts.
CODES = (
    (429, ("ratelimit", "toomanyrequests", "resourceexhausted", "throttl", "quota")),
    (402, ("insufficientbalance", "insufficientcredit", "insufficientfund", "paymentrequired")),
    (503, ("overload", "unavailable", "busy", "capacity")),
    (401, ("apikey", "unauthorized", "unauthenticated", "authentication")),
    (403, ("permission", "forbidden")),
    (504, ("timeout", "timedout", "deadline")),
    (404, ("notfound",)),
    (400, ("invalid", "badrequest", "contextlength", "unprocessable", "validation", "unsupported",
           "contentfilter", "contentpolicy")),
)  # fmt: skip
#: The same for messages of errors without such a code. They say much: only what is plain counts.
MESSAGES = (
    (429, ("ratelimit", "toomanyrequests")),
    (402, ("insufficientbalance", "insufficientcredit")),
    (503, ("overloaded", "temporarilyunavailable", "serviceunavailable", "serverbusy")),
    (404, ("unexpectedendpoint",)),  # LM Studio
)
#: Where the status or its word stands.
_CODES = ("code", "status", "status_code", "type")
#: What an error has that is not under `error`.
_TOLD = ("message", "detail", "errors", "msg")


def raise_error(found: Json, answer: Collection[str], *, begun: bool = True) -> None:
    """Raise what this body or chunk says of an error; `answer`: the fields that an answer has.

    `begun`: something of an answer may have come before it.

    Raises:
        Unanswered: there is an error.
    """
    error = found.get("error")
    if not error:
        if any(name in found for name in answer) and found.get("object") != "error":
            return
        if not any(found.get(name) for name in _TOLD):
            return
        error = found
    raise fault_of(error, found, begun=begun)


def fault_of(error: Any, beside: Json | None = None, *, begun: bool = True) -> Unanswered:
    """Return an error object or text as the fault that an HTTP error of its status would be.

    `beside`: what the error is a field of, where its code may stand.
    """
    if not isinstance(error, dict):
        codes = {name: beside[name] for name in _CODES if name in beside} if beside else {}
        error = {"message": error, **codes}
    message = _message(error)
    return Unanswered(_status(error, message), message, inside=begun, error=error)


def _message(error: Json) -> str:
    told = next((error[name] for name in _TOLD if error.get(name)), error)
    message = told if isinstance(told, str) else orjson.dumps(told, default=str).decode()
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, dict) else None
    # OpenRouter says "Provider returned error", and there what the provider said.
    return f"{message}: {raw}" if isinstance(raw, str) else message


def _status(error: Json, message: str) -> int:
    codes = [error.get(name) for name in _CODES]
    for code in codes:
        if str(code).isdecimal() and 400 <= int(str(code)) <= 599:
            return int(str(code))
    words = _squeezed(" ".join(code for code in codes if isinstance(code, str)))
    found = _first(CODES, words) or _first(MESSAGES, _squeezed(message))
    return found or 500


def _first(table: tuple[tuple[int, tuple[str, ...]], ...], words: str) -> int | None:
    return next((status for status, parts in table if any(p in words for p in parts)), None)


def _squeezed(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))
