"""Which answers are the model's text and nothing else, so that it can be told as it grows."""

from collections.abc import Mapping
from typing import Any

from contract.openai.body import LIMITS

#: Fields of which any value but null, false and an empty list asks for more than the text;
#: 0 logprobs are those of the chosen tokens.
MORE = frozenset((
    "logprobs", "echo", "use_beam_search", "return_token_ids", "return_tokens_as_token_ids",
    "return_token_offsets", "suffix", "top_logprobs",
))  # fmt: skip


def tells_text(url: str, body: Mapping[str, Any]) -> bool:
    """Say whether the text that the model writes is the answer's, word for word.

    A reasoning parser is the engine's, and not asked here.
    """
    if url not in LIMITS:
        return False
    if body.get("tools") and body.get("tool_choice") not in ("none", {"type": "none"}):
        return False
    asked = MORE.intersection(body)
    return all(body[name] is None or body[name] is False or body[name] == [] for name in asked)
