"""Which answers are the model's text and nothing else, so that they can be told while it writes.

Of the others a listener is told nothing: a part of the text becomes tool calls or reasoning, or
each token comes with something that the text alone does not have. Their result has it all.
"""

from contract.openai.plain_text import tells_text
from worker.engine import EngineRequest


def is_plain(request: EngineRequest) -> bool:
    """Say whether the text that the model writes is the answer's, word for word.

    A reasoning parser is the engine's, and not asked here (`Capacity.parses_chats`).
    """
    return tells_text(request.url, request.body)
