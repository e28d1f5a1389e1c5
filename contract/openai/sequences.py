"""How many sequences an engine runs for one request."""

from collections.abc import Mapping
from typing import Any

#: Fields that hold what is run: a list of texts, of lists of token ids, or of objects is so many
#: prompts; a text, or a list of token ids, is one. `documents` is of rerank, `text_2` of score.
PROMPTS = ("prompt", "input", "documents", "text_2")


def sequences_of(body: Mapping[str, Any]) -> int:
    """Return `n` × prompts of a body that was checked; at least 1.

    `input` of /v1/responses is a conversation, which is one prompt; with `messages` it is one, too.
    """
    n = body.get("n")
    count = n if isinstance(n, int) and n > 1 else 1
    for field in PROMPTS:
        found = body.get(field)
        if isinstance(found, list) and found and not isinstance(found[0], int):
            return count * (1 if _is_conversation(found) else len(found))
    return count


def _is_conversation(found: list[Any]) -> bool:
    """Say whether a list is Responses' input: objects with a role or a type of their own."""
    first = found[0]
    return isinstance(first, dict) and ("role" in first or "type" in first)
