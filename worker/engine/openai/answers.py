"""Checks that an answer is complete, and finds errors in answers of status 200."""

from collections.abc import Collection, Sequence
from typing import Any

import orjson

from contract.openai.body import CHAT_URL, GENERATING, MESSAGES_URL, RESPONSES_URL
from contract.openai.pooling import EMBEDDINGS_URL, POOLING_TYPES
from worker.engine.openai.dialect import Dialect
from worker.engine.openai.reassembly import Reassembly
from worker.engine.openai.retries import Condition, Unanswered
from worker.engine.openai.sse import loads_loosely, repaired

Json = dict[str, Any]

#: Fields of an answer, by url; an answer has at least one of them. Other urls are not checked.
FIELDS = (
    dict.fromkeys(GENERATING, ("choices",))
    | dict.fromkeys(POOLING_TYPES, ("data", "results"))
    | {MESSAGES_URL: ("content",), RESPONSES_URL: ("output",)}
)
#: Values of `status` in an answer of /v1/responses that has ended.
_ENDED = ("completed", "incomplete")
#: Values of finish_reason in a choice that has not ended.
_NO_END = (None, "", "null")
#: The largest number that is accepted as a count of tokens.
_MOST = 2**53


def lost_error(message: str = "the answer ends early") -> Unanswered:
    """Return the fault of an incomplete answer."""
    return Unanswered(Condition.LOST, message, inside=True)


def read_whole(url: str, request: Json, dialect: Dialect, raw: bytes) -> Json:
    """Read an answer that was sent in one piece, not as a stream.

    Raises:
        Unanswered: the answer is an error, or is incomplete.
        ValueError, LookupError, TypeError, AttributeError: the answer cannot be read.
    """
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        if url in POOLING_TYPES:  # orjson refuses vectors that contain NaN
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
    elif url == EMBEDDINGS_URL and len(answer["data"]) < (
        inputs := _prompt_count(request.get("input"))
    ):
        raise lost_error(f"the answer has {len(answer['data'])} of {inputs} embeddings")
    elif url == MESSAGES_URL and answer.get("stop_reason", "") is None:
        raise lost_error()
    elif url == RESPONSES_URL and answer.get("status", "completed") not in _ENDED:
        raise lost_error(f"the answer's status is {answer['status']}")
    return tidied(answer)


def _check_form(url: str, place: int, choice: Json) -> None:
    """Add a missing index. Raise LookupError if the choice has no text or message."""
    if not isinstance(choice.get("index"), int):
        choice["index"] = place
    name, expected = ("message", dict) if url == CHAT_URL else ("text", str)
    if not isinstance(choice.get(name), expected):
        raise LookupError(f"no {name}")


def check_choices(
    url: str, request: Json, dialect: Dialect, choices: Sequence[Json], *, finished: bool
) -> None:
    """Raise Unanswered unless there are as many choices as requested, and all have ended.

    `finished`: the server has marked the end of the answer. A server that gives fewer choices twice
    in a row does not support `n`, or lists of prompts: then the request fails, because a third try
    would cost money again.
    """
    _check_ends(choices)
    requested = requested_choices(url, request)
    if len(choices) >= requested:
        dialect.short *= requested == 1  # a request for one choice does not reset the count
        return
    if not (choices or finished):
        raise lost_error()
    message = f"the answer has {len(choices)} of {requested} choices"
    if finished and choices:
        dialect.short += 1
        if dialect.short > 1:
            param = "n" if (request.get("n") or 1) > 1 else "prompt"
            message = f"field {param}: the server does not give as many choices: {message}"
            raise Unanswered(422, message, inside=True, error={"message": message, "param": param})
    raise lost_error(message)


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
        raise lost_error()


def requested_choices(url: str, request: Json) -> int:
    """Return the requested number of choices."""
    each = request.get("n") or 1
    return each if url == CHAT_URL else each * _prompt_count(request.get("prompt"))


def _prompt_count(prompt: Any) -> int:
    """Return the number of prompts or inputs; 1 if the list may be one prompt of token ids."""
    if isinstance(prompt, list) and all(map(_is_prompt, prompt)):
        return len(prompt)
    return 1


def _is_prompt(prompt: Any) -> bool:
    """Whether this element of a list is one prompt: a text, or a list of token ids."""
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and all(isinstance(token, int) for token in prompt[:1])
    )


def tidied(answer: Json) -> Json:
    """Return the answer with a `usage` that has only whole numbers of tokens.

    A `usage` that is not an object becomes null, as do token counts that are not numbers.
    """
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


# -- errors in an answer of status 200 -------------------------------------------------

#: HTTP statuses, each with parts of the codes and types that mean it (in lower case, without
#: punctuation). The first match counts.
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
#: HTTP statuses, each with parts of the messages that mean it, for errors without a known code.
MESSAGES = (
    (429, ("ratelimit", "toomanyrequests")),
    (402, ("insufficientbalance", "insufficientcredit")),
    (503, ("overloaded", "temporarilyunavailable", "serviceunavailable", "serverbusy")),
    (404, ("unexpectedendpoint",)),  # LM Studio
)
#: Fields of an error that may contain its HTTP status, or a name for it.
_CODES = ("code", "status", "status_code", "type")
#: Fields that may contain the text of an error.
_ERROR_FIELDS = ("message", "detail", "errors", "msg")


def raise_error(body: Json, answer_fields: Collection[str], *, begun: bool = True) -> None:
    """Raise the error in this body or chunk, if there is one.

    `answer_fields` are the fields that an answer has. `begun`: the server may already
    have sent a part of the answer.
    """
    error = body.get("error")
    if not error:
        if any(name in body for name in answer_fields) and body.get("object") != "error":
            return
        if not any(body.get(name) for name in _ERROR_FIELDS):
            return
        error = body
    raise fault_of(error, body, begun=begun)


def fault_of(error: Any, parent: Json | None = None, *, begun: bool = True) -> Unanswered:
    """Return the fault for an error in an answer of status 200.

    The fault gets the HTTP status that the error means. `error` is an object or a text. `parent` is
    the object around it, which may contain its code.
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
    # OpenRouter's message is "Provider returned error"; the provider's own message is in `raw`.
    return f"{message}: {raw}" if isinstance(raw, str) else message


def _status(error: Json, message: str) -> int:
    codes = [error.get(name) for name in _CODES]
    for code in codes:
        if str(code).isdecimal() and 400 <= int(str(code)) <= 599:
            return int(str(code))
    words = " ".join(code for code in codes if isinstance(code, str))
    return _first_match(CODES, words) or _first_match(MESSAGES, message) or 500


def _first_match(table: tuple[tuple[int, tuple[str, ...]], ...], text: str) -> int | None:
    squeezed = "".join(filter(str.isalnum, text.lower()))
    return next((status for status, parts in table if any(p in squeezed for p in parts)), None)
