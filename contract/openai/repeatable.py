"""Finds requests whose answers depend on nothing but their bodies."""

from __future__ import annotations

from typing import Any

from contract.openai.body import LIMITS
from contract.openai.decode import encode

#: Fields that never change an answer.
_IRRELEVANT = frozenset(("user", "session_id", "priority", "stream"))
#: Fields with which two answers to one body may differ, unless null or false: beam search,
#: watermarks, arguments of plugins, and KV caches that another engine may send only once.
_NOT_REPEATABLE = frozenset((
    "use_beam_search", "watermarking", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"
))  # fmt: skip


def canonical(url: str, body: dict[str, Any], *, seeded: bool = False) -> bytes | None:
    """Return the JSON that bodies with the same answer share; None if answers may vary.

    An answer is repeatable if it depends on nothing but the valid body:

    - A generated text must be greedy: temperature 0, in the line or set for all. Without a
      temperature the model's default applies, which usually samples. At 0 vLLM ignores `seed`,
      `top_p`, `top_k` and `min_p` (SamplingParams.__post_init__). With `seeded` a seed suffices.
    - The answer must be one text, n = 1; vLLM refuses several greedy texts. With a seed, several
      texts are repeatable.
    - The body must have no field of _NOT_REPEATABLE and no medium by URL: the content of a URL may
      change, and a medium's uuid refers to a medium that the engine has seen before.
    - Answers of pooling models (embeddings, scores, rerankings) are not random.

    The order of the body's fields does not matter. The values of fields are compared as written,
    because a template or grammar may depend on the order of an object's properties.
    """
    greedy = body.get("temperature") == 0 and body.get("n") in (None, 1)
    if url in LIMITS and not greedy and not (seeded and isinstance(body.get("seed"), int)):
        return None
    if not _NOT_REPEATABLE.isdisjoint(body) and any(
        body.get(name) not in (None, False) for name in _NOT_REPEATABLE
    ):
        return None
    relevant = {name: body[name] for name in sorted(body) if name not in _IRRELEVANT}
    text = encode(relevant)
    if b'_url"' in text and _has_media_by_address(relevant):
        return None
    return text


def _has_media_by_address(body: dict[str, Any]) -> bool:
    """Return whether any part of a body has a medium with a URL other than `data:`."""
    pending: list[Any] = [body]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
            for name in value:
                medium = value[name] if name.endswith("_url") else "data:"
                url = medium.get("url") if isinstance(medium, dict) else medium
                if not (isinstance(url, str) and url.startswith("data:")):
                    return True
    return False
