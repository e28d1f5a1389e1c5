"""Checks that an answer is whole, and finds the error in a body of status 200."""

from collections.abc import Collection, Sequence
from typing import Any

import orjson

from contract.openai.body import CHAT_URL, GENERATING, MESSAGES_URL, RESPONSES_URL
from contract.openai.pooling import EMBEDDINGS_URL, POOLING_TYPES
from worker.engine.openai.reassembly import Reassembly
from worker.engine.openai.retries import Condition, Unanswered
from worker.engine.openai.sse import loads_loosely, repaired
from worker.engine.openai.upstream import Dialect

Json = dict[str, Any]

#: Fields of which an answer has at least one, by url; other urls are not checked.
FIELDS = (
    dict.fromkeys(GENERATING, ("choices",))
    | dict.fromkeys(POOLING_TYPES, ("data", "results"))
    | {MESSAGES_URL: ("content",), RESPONSES_URL: ("output",)}
)
#: Final statuses of a response.
_ENDED = ("completed", "incomplete")
#: Values of finish_reason before a choice has ended.
_NO_END = (None, "", "null")
#: A larger number is not a count of tokens.
_MOST = 2**53


def lost(message: str = "the answer ends early") -> Unanswered:
    """Return the fault of an answer that is not whole."""
    return Unanswered(Condition.LOST, message, inside=True)


def read_whole(url: str, request: Json, dialect: Dialect, raw: bytes) -> Json:
    """Read an answer without a stream.

    Raises:
        Unanswered: it is an error, or not whole.
        ValueError, LookupError, TypeError, AttributeError: it cannot be read.
    """
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        if url in POOLING_TYPES:  # a vector that contains NaN
            raise
        answer = repaired(loads_loosely(raw))
    fields = FIELDS.get(url, ())
    raise_error(answer, fields, begun=False)
    if fields and answer.keys().isdisjoint(fields):
        raise LookupError(f"no {' and no '.join(fields)}")
    if url in GENERATING:
        choices = answer["choices"] or []
        check_choices(url, request, dialect, choices, finished=True)
        if any("delta" in choice and "message" not in choice for choice in choices):
            chunk = Reassembly(url, request, vllm=False)
            chunk.add(answer)
            answer = chunk.body()
        for place, choice in enumerate(answer["choices"]):
            _check_form(url, place, choice)
    elif url == EMBEDDINGS_URL and len(answer["data"]) < (wanted := _many(request.get("input"))):
        raise lost(f"the answer has {len(answer['data'])} of {wanted} embeddings")
    elif url == MESSAGES_URL and answer.get("stop_reason", "") is None:
        raise lost()
    elif url == RESPONSES_URL and answer.get("status", "completed") not in _ENDED:
        raise lost(f"the answer's status is {answer['status']}")
    return tidied(answer)


def _check_form(url: str, place: int, choice: Json) -> None:
    """Add a missing index; LookupError without text or message."""
    if not isinstance(choice.get("index"), int):
        choice["index"] = place
    name, form = ("message", dict) if url == CHAT_URL else ("text", str)
    if not isinstance(choice.get(name), form):
        raise LookupError(f"no {name}")


def check_choices(
    url: str, request: Json, dialect: Dialect, choices: Sequence[Json], *, finished: bool
) -> None:
    """Raise Unanswered unless there are as many choices as requested, and all have ended.

    `finished`: the server has ended the answer. If it gives fewer choices twice in a row, it does
    not support `n`, or lists of prompts: the request fails instead of costing a third time.
    """
    _check_ends(choices)
    wanted = wanted_choices(url, request)
    if len(choices) >= wanted:
        dialect.short *= wanted == 1  # one choice proves nothing about several
        return
    if not (choices or finished):
        raise lost()
    message = f"the answer has {len(choices)} of {wanted} choices"
    if finished and choices:
        dialect.short += 1
        if dialect.short > 1:
            param = "n" if (request.get("n") or 1) > 1 else "prompt"
            message = f"field {param}: the server does not give as many choices: {message}"
            raise Unanswered(422, message, inside=True, error={"message": message, "param": param})
    raise lost(message)


def _check_ends(choices: Sequence[Json]) -> None:
    for choice in choices:
        if error := choice.get("error"):
            raise fault_of(error)
    ends = [choice.get("finish_reason") for choice in choices]
    if "abort" in ends:
        raise Unanswered(Condition.ENDED, "the server was shut down")
    if "error" in ends:
        raise Unanswered(500, "the server ended the answer with finish_reason `error`", inside=True)
    if any(end in _NO_END for end in ends):
        raise lost()


def wanted_choices(url: str, request: Json) -> int:
    """Return the requested number of choices."""
    each = request.get("n") or 1
    return each if url == CHAT_URL else each * _many(request.get("prompt"))


def _many(prompt: Any) -> int:
    """Return the number of prompts or inputs; 1 for what may be one."""
    if isinstance(prompt, list) and all(map(_is_one, prompt)):
        return len(prompt)
    return 1


def _is_one(prompt: Any) -> bool:
    """Whether this is one prompt of a list: text, or a list of token ids."""
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and all(isinstance(token, int) for token in prompt[:1])
    )


def tidied(answer: Json) -> Json:
    """Make `usage`, if there is one, an object or null, with whole numbers of tokens or null."""
    if "usage" in answer:
        usage = answer["usage"]
        answer["usage"] = _counts(usage) if isinstance(usage, dict) else None
    return answer


def _counts(usage: Json) -> Json:
    return {
        name: (
            _count(value) if name.endswith("_tokens") else
            _counts(value) if isinstance(value, dict) else value
        )
        for name, value in usage.items()
    }  # fmt: skip


def _count(value: Any) -> int | None:
    if type(value) is int and 0 <= value <= _MOST:
        return value
    try:
        count = int(float(value))
    except (ValueError, TypeError, OverflowError):
        return None
    return count if 0 <= count <= _MOST else None


# -- errors in the body of a 200, in the server's own words ----------------------------

#: Parts of an error's code or type, without case and underscores, by the status that they mean.
#: The first match counts.
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
#: The same of messages, for errors without a known code; fewer, as messages are free text.
MESSAGES = (
    (429, ("ratelimit", "toomanyrequests")),
    (402, ("insufficientbalance", "insufficientcredit")),
    (503, ("overloaded", "temporarilyunavailable", "serviceunavailable", "serverbusy")),
    (404, ("unexpectedendpoint",)),  # LM Studio
)
#: Fields that contain the status or its word.
_CODES = ("code", "status", "status_code", "type")
#: Fields of an error that is not under `error`.
_ERROR_FIELDS = ("message", "detail", "errors", "msg")


def raise_error(found: Json, answer: Collection[str], *, begun: bool = True) -> None:
    """Raise the error in this body or chunk, if any; `answer`: the fields of an answer.

    `begun`: part of an answer may have come before it.
    """
    error = found.get("error")
    if not error:
        if any(name in found for name in answer) and found.get("object") != "error":
            return
        if not any(found.get(name) for name in _ERROR_FIELDS):
            return
        error = found
    raise fault_of(error, found, begun=begun)


def fault_of(error: Any, parent: Json | None = None, *, begun: bool = True) -> Unanswered:
    """Return an error object or text as the fault of an HTTP error with its status.

    `parent`: the object with the error, which may contain its code.
    """
    if not isinstance(error, dict):
        parent = parent or {}
        error = {"message": error} | {name: parent[name] for name in _CODES if name in parent}
    message = _message(error)
    return Unanswered(_status(error, message), message, inside=begun, error=error)


def _message(error: Json) -> str:
    text = next((error[name] for name in _ERROR_FIELDS if error.get(name)), error)
    message = text if isinstance(text, str) else orjson.dumps(text, default=str).decode()
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, dict) else None
    # OpenRouter's message is "Provider returned error"; the provider's own is in `raw`.
    return f"{message}: {raw}" if isinstance(raw, str) else message


def _status(error: Json, message: str) -> int:
    codes = [error.get(name) for name in _CODES]
    for code in codes:
        if str(code).isdecimal() and 400 <= int(str(code)) <= 599:
            return int(str(code))
    words = " ".join(code for code in codes if isinstance(code, str))
    return _first(CODES, words) or _first(MESSAGES, message) or 500


def _first(table: tuple[tuple[int, tuple[str, ...]], ...], text: str) -> int | None:
    squeezed = "".join(filter(str.isalnum, text.lower()))
    return next((status for status, parts in table if any(p in squeezed for p in parts)), None)
