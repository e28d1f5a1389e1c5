"""Answers of `/v1/responses` with the fields that OpenAI requires and vLLM's classes leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

#: As OpenAI answers a request that names none of them.
_LEFT_OUT: dict[str, Any] = {
    "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
    "temperature": None, "top_p": None,
}  # fmt: skip


def with_all_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response that has them; each text of its output has its `logprobs`, too."""
    output = [_item(item) for item in body.get("output") or ()]
    return {**_LEFT_OUT, **body, "output": output, "usage": _usage(body.get("usage"))}


def bytes_with_all_fields(body: bytes) -> bytes:
    """Do the same to an answer's JSON."""
    return orjson.dumps(with_all_fields(orjson.loads(body)))


def _usage(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    # No engine here charges for what it writes into its prefix cache, or counts it.
    details = {
        "cached_tokens": 0,
        "cache_write_tokens": 0,
        **(usage.get("input_tokens_details") or {}),
    }
    return {**usage, "input_tokens_details": details}


def _item(item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type") != "message":
        return dict(item)
    return {**item, "content": [_part(part) for part in item.get("content") or ()]}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "output_text" and part.get("logprobs") is None:
        return {**part, "logprobs": []}
    return dict(part)
