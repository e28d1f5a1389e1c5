"""Which answers are the model's text and nothing else, so that they can be told while it writes.

Of the others a listener is told nothing: a part of the text becomes tool calls or reasoning, or
each token comes with something that the text alone does not have. Their result has it all.
"""

from contract.openai.body import LIMITS
from worker.engine import EngineRequest

#: Fields of which any value but null, false and an empty list asks for more than the text;
#: 0 logprobs are those of the chosen tokens.
MORE = (
    "logprobs", "echo", "use_beam_search", "return_token_ids", "return_tokens_as_token_ids",
    "return_token_offsets", "suffix", "top_logprobs",
)  # fmt: skip


def is_plain(request: EngineRequest) -> bool:
    """Say whether the text that the model writes is the answer's, word for word.

    A reasoning parser is the engine's, and not asked here (`Capacity.parses_chats`).
    """
    body = request.body
    if request.url not in LIMITS:
        return False
    if body.get("tools") and body.get("tool_choice") not in ("none", {"type": "none"}):
        return False
    asked = (body.get(name) for name in MORE)
    return all(value is None or value is False or value == [] for value in asked)
