"""How many sequences an engine runs for one request."""

from collections.abc import Iterable, Mapping
from typing import Any

#: Fields that hold what is run: a list of texts, of lists of token ids, or of objects is so many
#: prompts; a text, or a list of token ids, is one. Those of rerank and score are each one's
#: counterpart of the query.
PROMPTS = frozenset(
    ("prompt", "prompt_embeds", "input", "documents", "items", "text_2", "data_2")
)  # fmt: skip
#: What makes a body with one text as its prompt more than one sequence.
_BESIDE_A_TEXT = PROMPTS - {"prompt"} | {"n", "messages"}


def sequences_of(body: Mapping[str, Any]) -> int:
    """Return `n` × prompts of a body that was checked; at least 1.

    `input` of /v1/responses is a conversation, which is one prompt; `messages` are one, too,
    whatever `documents` they are about.
    """
    if type(body.get("prompt")) is str and body.keys().isdisjoint(_BESIDE_A_TEXT):
        return 1  # as in most completions
    n = body.get("n")
    count = n if isinstance(n, int) and n > 1 else 1
    messages = body.get("messages")
    if messages is not None:  # /v1/embeddings takes several conversations
        several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        return count * (len(messages) if several else 1)
    prompts = 0
    for field in PROMPTS.intersection(body):
        prompts += prompts_of(body[field])
    return count * (prompts or 1)


def fields_of_sequences(names: Iterable[str]) -> tuple[str, ...]:
    """Return which of a body's fields say how many sequences it is."""
    known = set(names)
    counted: tuple[str, ...]
    counted = ("messages", *sorted(PROMPTS))
    if "messages" in known and "input" not in known:
        counted = ()  # one conversation
    return tuple(name for name in ("n", *counted) if name in known)


def prompts_of(found: Any) -> int:
    """Return how many prompts a field holds."""
    if isinstance(found, str):
        return 1
    if isinstance(found, dict):  # a score's texts and pictures
        found = found.get("content")
    if not isinstance(found, list) or not found:
        return 0 if found is None else 1
    first = found[0]
    if isinstance(first, int) or (isinstance(first, dict) and ("role" in first or "type" in first)):
        return 1  # token ids, or Responses' conversation, whose items have a role or a type
    return len(found)
