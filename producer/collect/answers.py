"""Finds the text, finish reason and tokens in the answer of any endpoint."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
#: Bound of token counts; larger ones are ignored, because a column has 64 bits.
_MOST_TOKENS = 2**53

# Another program may have written a result, so a value of an unexpected type counts as missing.


def text_of(body: dict[str, Any]) -> str | None:
    """Return the text of an answer's first choice; None without text, for example an embedding."""
    if body.get("object") == "response":
        parts = [part for item in _objects(body, "output") for part in _objects(item, "content")]
        return _joined(parts, "output_text")
    if body.get("type") == "message":
        return _joined(_objects(body, "content"), "text")
    choice = _first_choice(body)
    text = (_get(choice, "message", dict) or {}).get("content", choice.get("text"))
    return text if isinstance(text, str) else None


def finish_reason_of(body: dict[str, Any]) -> str | None:
    """Return the reason why an answer ended, in its endpoint's own words."""
    if body.get("object") == "response":
        incomplete = _get(body, "incomplete_details", dict) or {}
        return _get(incomplete, "reason", str) or _get(body, "status", str)
    return _get(_first_choice(body), "finish_reason", str) or _get(body, "stop_reason", str)


def tokens_of(body: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer. Anthropic counts cached prompt tokens separately."""
    usage = _get(body, "usage", dict) or {}
    prompt, completion = _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
    if prompt is None and _number(usage, "input_tokens") is not None:
        cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
        prompt = sum(_number(usage, name) or 0 for name in ("input_tokens", *cached))
    return prompt, _number(usage, "output_tokens") if completion is None else completion


def _get(fields: dict[str, Any], name: str, kind: type[T]) -> T | None:
    value = fields.get(name)
    return value if isinstance(value, kind) else None


def _number(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if type(value) is int and abs(value) < _MOST_TOKENS else None


def _objects(fields: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [value for value in _get(fields, name, list) or [] if isinstance(value, dict)]


def _first_choice(body: dict[str, Any]) -> dict[str, Any]:
    return next(iter(_objects(body, "choices")), {})


def _joined(parts: list[dict[str, Any]], kind: str) -> str | None:
    texts = [_get(part, "text", str) for part in parts if part.get("type") == kind]
    return "".join(filter(None, texts)) or None
