"""Explains errors of fields, and handles the fields that vLLM does not have.

Most fields that only OpenAI and Anthropic have are about storage, caches and prices. They are
accepted, left out, and reported to the submitter. Fields that would change the answer are refused,
unless their value has no effect.
tests/unit/contract/openai/test_openai_fields.py compares the names with OpenAI's own client.
"""

import re
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from contract.errors import RequestRejected, bad_field
from contract.naming import nearest
from contract.openai.body import (
    BODY_TYPES,
    CHAT_URL,
    COMPLETION_URL,
    COUNT_TOKENS_URL,
    MESSAGES_URL,
    RESPONSES_URL,
    TOKENIZE_URL,
    field_names,
)
from contract.openai.decode import printable
from contract.openai.former_names import remedy_for_name

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_TYPE = re.compile(r"Expected `(?P<want>[^`]*)`, got `(?P<got>[^`]*)`")
_BOUND = re.compile(
    r"Expected `(?P<want>[^`]*)`(?P<length> of length)? (?P<sign>[<>]=?) (?P<n>\S+)"
)
_CHOICE = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

#: Type in msgspec's errors -> its name in warmq's errors, where the type is expected.
_WANT = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip
#: The same where a value of the type was given.
_GOT = _WANT | {"int": "a number", "float": "a number with a fraction"}
#: Sign of a number's bound -> problem, and beginning of the remedy.
_BEYOND = {
    ">=": ("is below", "at least"),
    "<=": ("is above", "at most"),
    ">": ("is not above", "more than"),
    "<": ("is not below", "less than"),
}

#: Field -> its remedy, for fields whose remedy does not follow from type and bounds alone.
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
#: Url -> remedies of fields that mean something else there than in REMEDIES.
_REMEDIES_OF = {
    MESSAGES_URL: {"max_tokens": "give a whole number of at least 1"},
    RESPONSES_URL: {
        "input": 'give a text, or a list such as [{"role": "user", "content": "Hello"}]'
    },
    TOKENIZE_URL: {"prompt": "give `prompt` (a text), or `messages`"},
}


def explain(text: str, url: str, where: str, body: Mapping[str, Any]) -> RequestRejected:
    """Return the error for msgspec's error `text` about a body; `where` precedes its field."""
    path_match = _PATH.search(text)
    path = path_match["path"] if path_match else ""
    text = _PATH.sub("", text)
    if unknown := _UNKNOWN.search(text):
        return _unknown(unknown["name"], url, where, body)
    if missing := _MISSING.search(text):
        path = f"{path}.{missing['name']}" if path else missing["name"]
        problem, remedy = "is missing", ""
    else:
        problem, remedy = _in_words(text, path, url)
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    # The remedy for a length above a bound names the bound; no other remedy may replace it.
    if "length that is above" not in problem:
        remedy = _REMEDIES_OF.get(url, {}).get(name) or REMEDIES.get(name, remedy)
    return bad_field(
        where + printable(path), printable(problem, 200) + (f"; {remedy}" if remedy else "")
    )


def _unknown(name: str, url: str, where: str, body: Mapping[str, Any]) -> RequestRejected:
    problem = remedy_for_name(name, url, body.get(name))
    if not problem:
        near = _near(name[:80], url)
        problem = f"unknown to {url}; remove it or correct its spelling"
        problem += f" (did you mean {near}?)" if near else ""
    return bad_field(where + printable(name), problem, code="unknown_field")


@lru_cache(1024)
def _near(name: str, url: str) -> str:
    return nearest(_CAPITAL.sub("_", name), sorted(known_names(url)), 0.75)


def _in_words(text: str, path: str, url: str) -> tuple[str, str]:
    """Return the problem and the remedy for msgspec's error `text`."""
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
    problem, allowed = _BEYOND[sign]
    if not bound["length"]:
        return f"{problem} {number}", f"give {allowed} {number}"
    unit = "characters" if bound["want"] == "str" else "entries"
    if (sign, number) == (">=", "1"):
        return "is empty", f"give {'a text' if unit == 'characters' else 'at least one entry'}"
    return f"has a length that {problem} {number}", f"give {allowed} {number} {unit}"


def _choices(path: str, url: str) -> list[str]:
    """Return the values of a Literal field."""
    fields = {field.name: field.type for field in msgspec.structs.fields(BODY_TYPES[url])}
    alternatives = typing.get_args(fields.get(path))
    return [value for each in alternatives for value in typing.get_args(each)]


#: Url -> fields that are accepted and left out.
IGNORED: dict[str, frozenset[str]] = {
    CHAT_URL: frozenset((
        "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store",
    )),
    RESPONSES_URL: frozenset((
        "access_programs", "context_management", "image", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier",
    )),
    # `thinking` has no effect: a model's template and chat_template_kwargs control its thinking.
    MESSAGES_URL: frozenset((
        "cache_control", "context_management", "diagnostics", "inference_geo", "service_tier",
        "speed", "thinking",
    )),
    COUNT_TOKENS_URL: frozenset((
        "cache_control", "context_management", "output_config", "speed", "thinking",
    )),
}  # fmt: skip
_NOTHING_KEPT = "no conversation is kept here; give all of it in `input`"
#: Url -> fields that are refused unless they have a value without effect: that value, the remedy.
REFUSED: dict[str, dict[str, tuple[Any, str]]] = {
    CHAT_URL: {
        "audio": (None, "answers are text here, never audio; remove it"),
        "function_call": (None, "is OpenAI's old name; use `tool_choice`"),
        "functions": (None, "is OpenAI's old name; use `tools`"),
        "modalities": (["text"], 'answers are text here; give ["text"], or remove it'),
        "moderation": (None, "nothing is moderated here; remove it"),
        "verbosity": (
            "medium",
            "models do not get this here; remove it, and ask in a message for the length",
        ),
        "web_search_options": (None, "nothing is searched here; remove it"),
    },
    COMPLETION_URL: {
        "best_of": (
            1,
            "the best of several texts is not chosen here; use `n`, or remove it",
        ),
    },
    RESPONSES_URL: {
        "background": (False, "a queued request is answered once; remove it"),
        "conversation": (None, _NOTHING_KEPT),
        "moderation": (None, "nothing is moderated here; remove it"),
        "previous_response_id": (None, _NOTHING_KEPT),
        "prompt": (None, "no prompts are kept here; write it into `input` and `instructions`"),
        "store": (False, "no response is kept here after it was collected; give false"),
    },
    MESSAGES_URL: {
        "container": (None, "nothing is executed here; remove it"),
        "mcp_servers": (None, "no server is asked here; give `tools`, or remove it"),
    },
}
#: Url -> all fields that vLLM does not have.
_NOT_IN_VLLM = {
    url: IGNORED.get(url, frozenset()) | REFUSED.get(url, {}).keys() for url in BODY_TYPES
}


def known_names(url: str) -> set[str]:
    """Return the field names of a body for `url`, with those of IGNORED and REFUSED."""
    return field_names(url) | _NOT_IN_VLLM[url]


def drop_ignored(url: str, body: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the body without fields that vLLM does not have; refuse those in REFUSED."""
    unsupported = _NOT_IN_VLLM[url]
    if unsupported.isdisjoint(body):
        return body
    refused = REFUSED.get(url, {})
    for name in refused.keys() & body.keys():
        harmless, remedy = refused[name]
        if body[name] is not None and body[name] != harmless:
            raise bad_field(where + name, remedy)
    return {name: value for name, value in body.items() if name not in unsupported}
