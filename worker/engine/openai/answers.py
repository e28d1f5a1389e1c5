"""Which answers are whole: as many choices as were asked for, each with an end that is one."""

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

#: What an answer has at least one of; nothing is known of the other urls' answers.
FIELDS = (
    dict.fromkeys(GENERATING, ("choices",))
    | dict.fromkeys(POOLING_TYPES, ("data", "results"))
    | {MESSAGES_URL: ("content",), RESPONSES_URL: ("output",)}
)
#: What a response's status is once it is all there is.
_ENDED = ("completed", "incomplete")
#: What servers say in the place of a finish_reason while there is none.
_NO_END = (None, "", "null")
#: Usage beyond this is no count of tokens.
_MOST = 2**53


def lost(what: str = "the answer ends early") -> Unanswered:
    """Return the fault of an answer that is not whole."""
    return Unanswered(Condition.LOST, what, inside=True)


def read_whole(url: str, request: Json, dialect: Dialect, raw: bytes) -> Json:
    """Read an answer that came at once.

    Raises:
        Unanswered: it is none, or not whole.
        ValueError, LookupError, TypeError, AttributeError: it cannot be read.
    """
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        if url in POOLING_TYPES:  # a vector with numbers that are none
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
    """Raise unless a choice has what everybody reads of it, and number it if it has no number.

    Raises:
        LookupError: it has not.
    """
    if not isinstance(choice.get("index"), int):
        choice["index"] = place
    name, form = ("message", dict) if url == CHAT_URL else ("text", str)
    if not isinstance(choice.get(name), form):
        raise LookupError(f"no {name}")


def _check_ends(choices: Sequence[Json]) -> None:
    """Raise unless all choices have ended by an end that is one."""
    for choice in choices:
        if error := choice.get("error"):
            raise fault_of(error)
    ends = [choice.get("finish_reason") for choice in choices]
    if "abort" in ends:
        raise Unanswered(Condition.ENDED, "the server was told to end")
    if "error" in ends:
        raise Unanswered(500, "the server ended the answer with finish_reason `error`", inside=True)
    if any(end in _NO_END for end in ends):
        raise lost()


def check_choices(
    url: str, request: Json, dialect: Dialect, choices: Sequence[Json], *, finished: bool
) -> None:
    """Raise unless there are as many choices as were asked for, and all have ended.

    `finished`: the server has said that there is no more. One that gives fewer twice in a row does
    not know `n`, or lists of prompts: nobody pays for a third time.

    Raises:
        Unanswered: with the server's words if a choice has an error.
    """
    _check_ends(choices)
    wanted = wanted_choices(url, request)
    if len(choices) >= wanted:
        dialect.short *= wanted == 1  # where one was asked for, one says nothing
        return
    if not (choices or finished):
        raise lost()
    words = f"the answer has {len(choices)} of {wanted} choices"
    if finished and choices:
        dialect.short += 1
        if dialect.short > 1:
            param = "n" if (request.get("n") or 1) > 1 else "prompt"
            words = f"field {param}: the server does not give as many choices: {words}"
            raise Unanswered(422, words, inside=True, error={"message": words, "param": param})
    raise lost(words)


def wanted_choices(url: str, request: Json) -> int:
    """Return how many choices were asked for."""
    each = request.get("n") or 1
    return each if url == CHAT_URL else each * _many(request.get("prompt"))


def _many(prompt: Any) -> int:
    """Return how many prompts or inputs these are; 1 for what may be one."""
    if isinstance(prompt, list) and all(map(_is_one, prompt)):
        return len(prompt)
    return 1


def _is_one(prompt: Any) -> bool:
    """Whether this is one prompt of a list: text, or a list of token ids."""
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and all(isinstance(token, int) for token in prompt[:1])
    )


def tidied(answer: Json) -> Json:
    """Return the answer with a usage that is an object or null, whose tokens are whole or null."""
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
