"""What an answer says, whichever endpoint gave it: its text, why it ended, its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Body = Mapping[str, Any]


def text_of(body: Body) -> str | None:
    """Return the text of an answer's first choice, of a response or of a message; None if it has
    none, as embeddings have."""
    if body.get("object") == "response":
        said = [part for item in _objects(body, "output") for part in _objects(item, "content")]
        return _joined(said, "output_text")
    if body.get("type") == "message":
        return _joined(_objects(body, "content"), "text")
    choice = _choice(body)
    found = (choice.get("message") or {}).get("content", choice.get("text"))
    return found if isinstance(found, str) else None


def finish_reason_of(body: Body) -> str | None:
    """Return why an answer ended, in its endpoint's own words."""
    if body.get("object") == "response":
        cut = body.get("incomplete_details")
        found = cut.get("reason") if isinstance(cut, Mapping) else None
        return found or body.get("status")
    return _choice(body).get("finish_reason") or body.get("stop_reason")


def tokens_of(body: Body) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer. Anthropic counts those of the cache apart."""
    usage = body.get("usage") or {}
    asked, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if asked is None and usage.get("input_tokens") is not None:
        cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
        asked = sum(usage.get(name) or 0 for name in ("input_tokens", *cached))
    return asked, usage.get("output_tokens") if written is None else written


def _choice(body: Body) -> Body:
    return next(iter(body.get("choices") or []), None) or {}


def _objects(of: Body, name: str) -> list[Body]:
    found = of.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _joined(parts: Iterable[Body], kind: str) -> str | None:
    texts = [part["text"] for part in parts if part.get("type") == kind and part.get("text")]
    return "".join(texts) if texts else None
