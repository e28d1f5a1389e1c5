"""What vLLM answers for a pooling model, as far as it differs from generated text."""

from __future__ import annotations

import orjson

from contract.errors import EngineDead
from worker.engine import Completion


def pooled(raw: bytes, model: str | None) -> Completion:
    """Return the completion of an embeddings, score or rerank response.

    Args:
        raw: the response's JSON.
        model: what the line calls the model, if it does.

    Raises:
        EngineDead: the answer is empty; vLLM makes such of what it was told to give up.
    """
    answer = orjson.loads(raw)
    if any(entry.get("embedding") == [] for entry in answer.get("data", ())):
        raise EngineDead("the engine was told to end", inside=False)
    if model:
        answer["model"] = model
        raw = orjson.dumps(answer)
    return Completion(raw, answer["usage"]["prompt_tokens"], 0)
