"""Fields that OpenAI's (and Anthropic's) requests have and vLLM's have not, or only seem to have.

Most of them concern their storage, caches and tariffs. They mean nothing here, so they are
accepted and left out, and whoever submits is told which they were. Those that would change the
answer are refused. A null is as good as no field.
tests/unit/contract/openai/test_openai_fields.py compares the names with those of OpenAI's own
client.
"""

from typing import Any

from contract.errors import RequestRejected
from contract.openai.body import BODY_TYPES, CHAT_URL, COMPLETION_URL, field_names
from contract.openai.messages import COUNT_TOKENS_URL, MESSAGES_URL
from contract.openai.responses import RESPONSES_URL

#: Accepted and left out.
IGNORED: dict[str, frozenset[str]] = {
    CHAT_URL: frozenset((
        "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store",
    )),
    RESPONSES_URL: frozenset((
        "access_programs", "context_management", "image", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier",
    )),
    # How long a model thinks is its template's to say, and its chat_template_kwargs'.
    MESSAGES_URL: frozenset((
        "cache_control", "context_management", "diagnostics", "inference_geo", "service_tier",
        "speed", "thinking",
    )),
    COUNT_TOKENS_URL: frozenset((
        "cache_control", "context_management", "output_config", "speed", "thinking",
    )),
}  # fmt: skip
_FORGETS = "no conversation is kept here; give all of it in `input`"
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
    RESPONSES_URL: {
        "background": (False, "a queued request is answered once; remove it"),
        "conversation": (None, _FORGETS),
        "moderation": (None, "nothing is moderated here; remove it"),
        "previous_response_id": (None, _FORGETS),
        "prompt": (None, "no prompts are kept here; write it into `input` and `instructions`"),
        "store": (False, "no response is kept here after it was collected; give false"),
    },
    MESSAGES_URL: {
        "container": (None, "nothing is executed here; remove it"),
        "mcp_servers": (None, "no server is asked here; give `tools`, or remove it"),
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
