"""Checks lines and bodies; errors name the field and the remedy.

A line is an OpenAI batch line `{"custom_id", "method", "url", "body"}`, or the short form: the
fields of a body with an optional `custom_id`.
"""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
import orjson

from contract.errors import RequestRejected, bad_field
from contract.openai.amounts import MAX_PROMPTS, fields_of_sequences, refuse_many, sequences_of
from contract.openai.body import (
    BODY_TYPES,
    CHAT_URL,
    COMPLETION_URL,
    LIMITS,
    field_names,
    limits_tokens,
    min_body,
)
from contract.openai.decode import MAX_DEPTH, decode, encode, int_bounds, int_if_whole, printable
from contract.openai.fields import drop_ignored, explain
from contract.openai.pooling import FORMS
from contract.openai.structured import FIELDS, constrains, refuse_large

#: Most characters of a custom_id.
MAX_CUSTOM_ID = 512
#: Fields of a batch line except custom_id.
_BATCH_FIELDS = frozenset(("method", "url", "body"))
#: Pattern of msgspec's error for a float where an int is expected. pandas writes 16.0 for 16, and
#: vLLM accepts it.
_FLOAT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$\.(\w+)")
#: Fields with the request's content, which a value for all lines must not replace.
_CONTENT = frozenset(
    ("prompt", "messages", *(n for forms in FORMS.values() for form in forms for n in form))
)
_CONSTRAINTS = frozenset(FIELDS)
#: Fields that constrain an answer's form. If a body has both, vLLM silently ignores the second.
_ANSWER_FORMS = ("response_format", "structured_outputs")
_STREAM_FIELDS = ("stream", "stream_options", "stream_interval")


class Request(msgspec.Struct, frozen=True):
    """A valid request; `body` is JSON.

    `limited`: whether the request limits the tokens of its answer, or the answer has no tokens.
    `ignored`: fields of the line that were left out of `body`. `sequences`: number of sequences
    that the engine runs for the request. `model`: the name in the body, '' without one.
    """

    custom_id: str | None
    url: str
    body: bytes
    limited: bool
    ignored: tuple[str, ...] = ()
    sequences: int = 1
    model: str = ""


def check_body(url: str, body: dict[str, Any], where: str = "body.") -> dict[str, Any]:
    """Check the names, types and ranges of a body; return it without ignored fields.

    Raises RequestRejected, which names the first bad field and the remedy. `where` precedes the
    field's name.
    """
    if url not in BODY_TYPES:
        raise _unknown_url(url)
    kept = drop_ignored(url, body, where)
    if not kept.keys().isdisjoint(_STREAM_FIELDS):
        kept = _without_stream_fields(kept, where)
    checked = {name: kept[name] for name in kept if name != "stream"} if "stream" in kept else kept
    try:
        msgspec.convert(checked, BODY_TYPES[url])
    except msgspec.ValidationError as error:
        message = str(error)
        if found := _FLOAT.match(message):
            name = found[1]
            fixed = int_if_whole(kept[name])
            if fixed is not kept[name]:
                return check_body(url, kept | {name: fixed}, where)
        raise explain(message, url, where, checked) from None
    for name in () if _CONSTRAINTS.isdisjoint(checked) else _CONSTRAINTS.intersection(checked):
        bounded = _checked_constraint(name, checked[name], where)
        kept = kept if bounded is checked[name] else kept | {name: bounded}
    refuse_many(checked, where)
    return kept


#: Field -> the last valid constraint, and the value of `int_bounds` for it. A constraint for all
#: lines is the same object in each; a large one takes 6 ms to check.
_last_constraint: dict[str, tuple[Any, Any]] = {}


def _checked_constraint(name: str, value: Any, where: str) -> Any:
    """Return a constraint in which bounds such as 16.0 are ints.

    Raises RequestRejected if the constraint is too large.
    """
    last = _last_constraint.get(name)
    if last is None or last[0] is not value:
        refuse_large(name, value, where)
        last = _last_constraint[name] = (value, int_bounds(value))
    return last[1]


def _without_stream_fields(body: dict[str, Any], where: str) -> dict[str, Any]:
    """Refuse a body that asks for a stream; return it without null fields about streams."""
    for name in _STREAM_FIELDS:
        value = body.get(name)
        if value is not None and not (name == "stream" and value is False):
            raise bad_field(where + name, "a queued request cannot stream; remove it")
    nulls = [name for name in _STREAM_FIELDS if body.get(name, "") is None]
    return {name: value for name, value in body.items() if name not in nulls}


def _checked_custom_id(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and 0 < len(value) <= MAX_CUSTOM_ID:
        return value
    problem = f"is {_type_in_words(value)}"
    if isinstance(value, str):
        problem = f"has {len(value)} characters"
        problem = f"{printable(value, 60)!r} {problem}" if value else problem
    remedy = f"give a text of 1 to {MAX_CUSTOM_ID} characters, in quotes"
    raise bad_field("custom_id", f"{problem}; {remedy}, or leave it out for the line's number")


def infer_url(body: dict[str, Any]) -> str:
    """Return the url for a body in the short form."""
    if "messages" in body:
        return CHAT_URL
    if "prompt" in body:
        return COMPLETION_URL
    problem = (
        "neither `messages` nor `prompt` is given; give one of them, or `url` and `body` for "
        "another endpoint"
    )
    raise bad_field("prompt", problem)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """An OpenAI batch line with usual fields."""

    url: str
    body: msgspec.Raw
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID)] | None = None
    method: Literal["POST"] = "POST"


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_body = {url: msgspec.json.Decoder(shape).decode for url, shape in BODY_TYPES.items()}
#: Url -> getter of a body's token limit; it returns two values if the url has two names for it.
_limits_of = {url: attrgetter(*names) for url, names in LIMITS.items()}


class _RareFields:
    """Fields of a url's bodies that few bodies have, and whose content must then be checked.

    `constraints` are checked by structured.py; `counted` determine the number of sequences.
    `usual_field` is the counted field that most bodies of the url have, `prompt` or `input`; '' if
    there is none. It needs no check if its value is a text, which is one sequence.
    """

    def __init__(self, url: str) -> None:
        names = field_names(url)
        self.constraints = tuple(name for name in FIELDS if name in names)
        self.counted = fields_of_sequences(names)
        self.usual_field = next((name for name in ("prompt", "input") if name in self.counted), "")
        rare = tuple(
            dict.fromkeys(
                name for name in (*self.constraints, *self.counted) if name != self.usual_field
            )
        )
        self.values: Callable[[Any], tuple[Any, ...]] = (
            attrgetter(*rare)
            if len(rare) > 1
            else lambda body: tuple(getattr(body, name) for name in rare)
        )


_rare_of = {url: _RareFields(url) for url in BODY_TYPES}
#: Most bytes of a line that `_plain_line` decodes. A longer one may have too many JSON values;
#: `_any_line` counts these before it decodes.
_SHORT = 65_536


def _plain_line(raw: bytes) -> Request | None:
    """Return the request of a valid batch line with usual fields, without encoding its body again.

    Returns None for any other line; `_any_line` then accepts or refuses it.
    """
    if len(raw) > _SHORT or raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:
        return None
    try:
        line = _decode_line(raw)
        body: Any = _decode_body[line.url](line.body)
        text = bytes(line.body)
        orjson.loads(text)  # msgspec does not check the content of unknown fields
        rare, sequences = _rare_of[line.url], 1
        values = rare.values(body)
        if values.count(None) < len(values) or (
            rare.usual_field and type(getattr(body, rare.usual_field)) is not str
        ):
            sequences = _check_rare(body, rare)
    except (
        msgspec.DecodeError, orjson.JSONDecodeError, UnicodeDecodeError, KeyError, RequestRejected
    ):  # fmt: skip
        return None
    if sequences != 1 and not 0 < sequences <= MAX_PROMPTS:
        return None
    limits = _limits_of[line.url](body) if line.url in _limits_of else True
    limited = limits is not None and limits != (None, None)
    return Request(line.custom_id, line.url, text, limited, (), sequences, body.model or "")


def _check_rare(body: Any, rare: _RareFields) -> int:
    """Return the number of sequences of a decoded body; 0 if its constraints must be rewritten.

    Raises RequestRejected for a constraint that is too large.
    """
    for name in rare.constraints:
        if (value := getattr(body, name)) is not None:
            refuse_large(name, value, "body.")
            if int_bounds(value) is not value:
                return 0
    return sequences_of({name: getattr(body, name) for name in rare.counted})


def parse_line(raw: bytes, overrides: dict[str, Any] | None = None) -> Request:
    """Return the checked request of a line; `overrides` replace fields of its body.

    Raises RequestRejected without a line number; it has the line's custom_id if that is valid.
    """
    plain = None if overrides else _plain_line(raw)
    return plain or _any_line(raw, overrides or {})


def _any_line(raw: bytes, overrides: dict[str, Any]) -> Request:
    value = decode(raw)
    if not isinstance(value, dict):
        raise RequestRejected("not a JSON object; write {...} on each line", code="invalid_json")
    custom_id = _checked_custom_id(value.pop("custom_id", None))
    try:
        url, body, where = _split_form(value)
        refuse_second_content(body, overrides, where)
        body.update(overrides)
        kept = check_body(url, body, where)
        ignored = tuple(name for name in body.keys() - kept.keys() if body[name] is not None)
        limited, count = limits_tokens(url, body), sequences_of(kept)
        model = kept.get("model") or ""
        return Request(custom_id, url, encode(kept), limited, ignored, count, model)
    except RequestRejected as error:
        error.custom_id = custom_id
        raise


def refuse_second_content(body: dict[str, Any], overrides: dict[str, Any], where: str) -> None:
    """Refuse content that is given both in the line and for all lines."""
    for name in _CONTENT.intersection(overrides):
        if overrides[name] is not None and body.get(name) is not None:
            problem = "is in the line, and given for all lines as well; leave one out"
            raise bad_field(where + name, problem)
    for name, other in (_ANSWER_FORMS, _ANSWER_FORMS[::-1]):
        if constrains(name, overrides.get(name)) and constrains(other, body.get(other)):
            problem = f"is in the line, and {name} is given for all lines; leave one out"
            raise bad_field(where + other, problem)


def _split_form(value: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    if value.keys().isdisjoint(_BATCH_FIELDS):
        return infer_url(value), value, ""
    if not value.keys() <= _BATCH_FIELDS:
        name = min(map(printable, value.keys() - _BATCH_FIELDS))
        problem = "unknown in a batch line; body fields belong inside `body`"
        raise bad_field(name, problem, code="unknown_field")
    method = value.get("method", "POST")
    if method != "POST":
        text = printable(repr(method)) if isinstance(method, str) else _type_in_words(method)
        problem = f"{text} is not served; write POST, or leave it out"
        raise bad_field("method", problem, code="unknown_url")
    if "url" not in value:
        problem = (
            f"is missing; give one of {', '.join(BODY_TYPES)}, or write the fields of `body` "
            "themselves on the line (the short form)"
        )
        raise bad_field("url", problem, code="unknown_url")
    url, body = value["url"], value.get("body")
    if not isinstance(url, str) or url not in BODY_TYPES:
        raise _unknown_url(url)
    if not isinstance(body, dict):
        problem = f"is {_type_in_words(body)}" if "body" in value else "is missing"
        example = encode(min_body(url)).decode()
        problem += f"; give the request's fields as a JSON object, such as {example}"
        raise bad_field("body", problem)
    return url, body, "body."


def _type_in_words(value: object) -> str:
    """Return a JSON value's type in words; the value may be too large or deep to print."""
    kinds = {type(None): "null", bool: "true or false", int: "a number", float: "a number",
             str: "a text", list: "a list", dict: "an object"}  # fmt: skip
    return kinds[type(value)]


def _unknown_url(url: object) -> RequestRejected:
    # repr() of a deep list would exceed Python's recursion limit.
    text = (
        f"{printable(repr(url))} is not served"
        if isinstance(url, str)
        else f"is {_type_in_words(url)}"
    )
    return bad_field("url", f"{text}; use one of {', '.join(BODY_TYPES)}", code="unknown_url")
