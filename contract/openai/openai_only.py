"""Fields that OpenAI's requests have and vLLM's have not.

Most of them concern OpenAI's storage, caches and tariffs. They mean nothing here, so they are
accepted and left out, and whoever submits is told which they were. Those that would change the
answer are refused. A null is as good as no field. tests/unit/test_openai_fields.py compares
the names with those of OpenAI's own client.
"""

from typing import Any

from contract.errors import RequestRejected
from contract.openai.body import BODY_TYPES, CHAT_URL, COMPLETION_URL, field_names

#: Accepted and left out.
IGNORED: dict[str, frozenset[str]] = {
    CHAT_URL: frozenset((
        "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store",
    )),
}  # fmt: skip
#: Refused unless they have the value that changes nothing: that value, and what to do.
REFUSED: dict[str, dict[str, tuple[Any, str]]] = {
    CHAT_URL: {
        "audio": (None, "answers are text here, never audio; remove it"),
        "function_call": (None, "is OpenAI's old name; use `tool_choice`"),
        "functions": (None, "is OpenAI's old name; use `tools`"),
        "modalities": (["text"], 'answers are text here; give ["text"], or remove it'),
        "moderation": (None, "nothing is moderated here; remove it"),
        "verbosity": (
            "medium",
            "models are not told this here; remove it, and say in a message how long to write",
        ),
        "web_search_options": (None, "nothing is searched here; remove it"),
    },
    COMPLETION_URL: {
        "best_of": (
            1,
            "the best of several texts is not chosen here; use `n`, or remove it",
        ),
    },
}
_ONLY_OPENAI = {
    url: IGNORED.get(url, frozenset()) | REFUSED.get(url, {}).keys() for url in BODY_TYPES
}


def known_names(url: str) -> set[str]:
    """Return the field names that a body for `url` may have, those that are left out too."""
    return field_names(url) | _ONLY_OPENAI[url]


def without(url: str, body: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the body without the fields that only OpenAI has; `where` precedes names in errors.

    Raises:
        RequestRejected: for a field that asks for what cannot be given here.
    """
    theirs = _ONLY_OPENAI[url]
    if theirs.isdisjoint(body):
        return body
    refused = REFUSED.get(url, {})
    for name in refused.keys() & body.keys():
        harmless, remedy = refused[name]
        if body[name] is not None and body[name] != harmless:
            field = where + name
            raise RequestRejected(f"field {field}: {remedy}", field=field)
    return {name: value for name, value in body.items() if name not in theirs}
