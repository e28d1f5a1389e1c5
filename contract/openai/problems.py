"""Says in plain words what is wrong with a field, and what to give instead."""

import re
import typing
from functools import lru_cache

import msgspec

from contract.errors import RequestRejected
from contract.nearest import nearest
from contract.openai.body import BODY_TYPES
from contract.openai.decode import shown
from contract.openai.messages import MESSAGES_URL
from contract.openai.openai_only import known_names
from contract.openai.responses import RESPONSES_URL, TOKENIZE_URL

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_TYPE = re.compile(r"Expected `(?P<want>[^`]*)`, got `(?P<got>[^`]*)`")
_BOUND = re.compile(
    r"Expected `(?P<want>[^`]*)`(?P<length> of length)? (?P<sign>[<>]=?) (?P<n>\S+)"
)
_CHOICE = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

#: JSON's types in words.
_WANT = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip
_GOT = _WANT | {"int": "a number", "float": "a number with a fraction"}
#: What a number is, and what to give instead.
_BEYOND = {
    ">=": ("is below", "at least"),
    "<=": ("is above", "at most"),
    ">": ("is not above", "more than"),
    "<": ("is not below", "less than"),
}

#: What to give for a bad field, where its type and bounds alone do not say it.
REMEDIES = {
    "max_tokens": "give a whole number of at least 1, or leave it out for the worker's default",
    "max_completion_tokens": "give a whole number of at least 1, or leave it out",
    "temperature": "give a number from 0 (greedy) to 2",
    "top_p": "give a number above 0 and at most 1",
    "n": "give a whole number from 1 to 128",
    "stop": "give a text or a list of texts, none of them empty",
    "seed": "give a whole number that fits 64 bits",
    "messages": 'give at least one message such as {"role": "user", "content": "Hello"}',
    "prompt": "give a text, a list of token ids, or a list of texts",
    "input": "give `input` (a text, token ids, or a list of either), or `messages`",
    "query": "give `query` and `documents`",
    **dict.fromkeys(
        ("queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"),
        "give `queries` and `documents`, `queries` and `items`, `text_1` and `text_2`, or `data_1` "
        "and `data_2`; to rerank, `query` and `documents`",
    ),
}
#: The same for one endpoint, where the field means something else there.
_REMEDIES_OF = {
    MESSAGES_URL: {"max_tokens": "give a whole number of at least 1"},
    RESPONSES_URL: {
        "input": 'give a text, or a list such as [{"role": "user", "content": "Hello"}]'
    },
    TOKENIZE_URL: {"prompt": "give `prompt` (a text), or `messages`"},
}


def bad_field(field: str, problem: str, code: str | None = None) -> RequestRejected:
    """Return the error for a field, whose name may be preceded by `body.`."""
    return RequestRejected(f"field {field}: {problem}", code=code, field=field)


def explain(text: str, url: str, where: str) -> RequestRejected:
    """Return the error for a body that msgspec refuses with `text`; `where` as in `bad_field`."""
    path_match = _PATH.search(text)
    path = path_match["path"] if path_match else ""
    text = _PATH.sub("", text)
    if unknown := _UNKNOWN.search(text):
        return _unknown(unknown["name"], url, where)
    if missing := _MISSING.search(text):
        path = f"{path}.{missing['name']}" if path else missing["name"]
        problem, give = "is missing", ""
    else:
        problem, give = _in_words(text, path, url)
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    if "length that is above" not in problem:
        give = _REMEDIES_OF.get(url, {}).get(name) or REMEDIES.get(name, give)
    return bad_field(where + shown(path), shown(problem, 200) + (f"; {give}" if give else ""))


def _unknown(name: str, url: str, where: str) -> RequestRejected:
    near = _near(name[:80], url)
    problem = f"unknown to {url}; remove it or correct its spelling"
    problem += f" (did you mean {near}?)" if near else ""
    return bad_field(where + shown(name), problem, code="unknown_field")


@lru_cache(1024)
def _near(name: str, url: str) -> str:
    return nearest(_CAPITAL.sub("_", name), sorted(known_names(url)), 0.75)


def _in_words(text: str, path: str, url: str) -> tuple[str, str]:
    """Return what is wrong, and what to give."""
    if of_type := _TYPE.fullmatch(text):
        wanted = [_WANT.get(word, word) for word in of_type["want"].split(" | ") if word != "null"]
        got = of_type["got"]
        return f"is {_GOT.get(got, got)}", f"give {' or '.join(wanted)}"
    if bound := _BOUND.fullmatch(text):
        return _beyond(bound)
    if choice := _CHOICE.fullmatch(text):
        return f"is {choice['value']}", f"give one of {', '.join(_choices(path, url))}"
    return text.replace("`", ""), ""


def _beyond(bound: re.Match[str]) -> tuple[str, str]:
    sign, number = bound["sign"], bound["n"].removesuffix(".0")
    problem, give = _BEYOND[sign]
    if not bound["length"]:
        return f"{problem} {number}", f"give {give} {number}"
    unit = "characters" if bound["want"] == "str" else "entries"
    if (sign, number) == (">=", "1"):
        return "is empty", f"give {'a text' if unit == 'characters' else 'at least one entry'}"
    return f"has a length that {problem} {number}", f"give {give} {number} {unit}"


def _choices(path: str, url: str) -> list[str]:
    """Return the values of the field of that name, which a Literal lists."""
    fields = {field.name: field.type for field in msgspec.structs.fields(BODY_TYPES[url])}
    alternatives = typing.get_args(fields.get(path))
    return [value for each in alternatives for value in typing.get_args(each)]
