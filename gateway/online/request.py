"""What an online request asks for: its body checked, and what concerns the gateway alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from contract.errors import RequestRejected
from contract.openai.amounts import sequences_of
from contract.openai.body import LIMITS, text_is_answer
from contract.openai.decode import decode, encode, int_if_whole
from contract.openai.lines import check_body
from gateway.http.errors import ApiError, invalid
from gateway.http.limits import estimated_tokens

#: Queue priorities: online requests go before everything, OpenAI's `flex` before batches.
URGENT, FLEX = 0, 3
LOWEST = 9


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options` of a request; other fields, as OpenAI's, mean nothing here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@dataclass(frozen=True, slots=True)
class OnlineRequest:
    """One request. `body` is its JSON as the engine gets it; `priority` is the queue's, 0 to 9.

    With `stream` the answer comes in events. `tokens` is about how many its prompt has and its
    answer may have, as far as it says; `prompt_tokens` are those of the prompt alone. With
    `text_is_answer` its text can be sent while it is written. The engine runs `sequences` for it.
    """

    url: str
    body: bytes
    model: str | None
    priority: int
    stream: StreamOptions | None
    tokens: int
    prompt_tokens: int
    text_is_answer: bool
    sequences: int = 1


def read(url: str, raw: bytes, highest_priority: int) -> OnlineRequest:
    """Read a body; its caller's requests have `highest_priority` (the smallest number) at most.

    Raises:
        ApiError, RequestRejected: naming the field and what to give instead.
    """
    body = _object(raw)
    fields = len(body)
    stream = _stream(url, body)
    priority = _priority(body)
    kept = check_body(url, body, "")
    prompt = estimated_tokens(len(raw))
    return OnlineRequest(
        url,
        raw if kept is body and len(body) == fields else encode(kept),
        kept.get("model"),
        min(LOWEST, max(highest_priority, priority)),
        stream,
        prompt + _most_written(url, kept),
        prompt,
        text_is_answer(url, kept),
        sequences_of(kept),
    )


def with_model(asked: OnlineRequest, model: str) -> OnlineRequest:
    """Return the same request with the name of a model in its body, in place of none."""
    return replace(asked, body=encode(decode(asked.body) | {"model": model}), model=model)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = decode(raw)
    except RequestRejected as error:
        message = error.message.partition("; write one JSON")[0]
        raise ApiError(400, f"the body is {message}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def _stream(url: str, body: dict[str, Any]) -> StreamOptions | None:
    """Take what says how to answer out of the body; None: in one piece."""
    asked, options = body.pop("stream", None), body.pop("stream_options", None)
    if asked is not None and not isinstance(asked, bool):
        raise invalid("`stream` is true or false", "stream")
    if not asked:
        if options is not None:
            raise invalid("`stream_options` needs `stream: true`; remove it", "stream_options")
        return None
    if url not in LIMITS:
        raise invalid(f"{url} has no streamed answers; remove `stream`", "stream")
    try:
        return msgspec.convert(options or {}, StreamOptions)
    except msgspec.ValidationError as error:
        raise invalid(f"`stream_options`: {error}", "stream_options") from None


def _priority(body: dict[str, Any]) -> int:
    """Take the queue's priority out of the body: vLLM's own field, or OpenAI's tier."""
    asked = int_if_whole(body.get("priority"))
    if type(asked) is int:  # anything else is refused by name with the other fields
        del body["priority"]
        return max(URGENT, asked)
    return FLEX if body.get("service_tier") == "flex" else URGENT


def _most_written(url: str, body: dict[str, Any]) -> int:
    named = [body[name] for name in LIMITS.get(url, ()) if body.get(name) is not None]
    return min(named, default=0) * (body.get("n") or 1) * _prompts(body.get("prompt"))


def _prompts(prompt: Any) -> int:
    """Return how many prompts a completion has: texts or lists of token ids in a list."""
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return len(prompt) if several else 1
