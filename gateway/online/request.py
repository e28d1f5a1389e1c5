"""Checks the body of an online request, and removes fields that only the gateway uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from contract.errors import RequestRejected
from contract.openai.amounts import sequences_of
from contract.openai.body import LIMITS, RESPONSES_URL, text_is_answer
from contract.openai.decode import decode, encode, int_if_whole
from contract.openai.lines import check_body
from gateway.http.errors import ApiError, invalid
from gateway.http.limits import estimated_tokens

#: Queue priorities: of online requests, of OpenAI's `flex` (still before batches), of background
#: responses (that of batches), and the lowest.
URGENT, FLEX, LATER, LOWEST = 0, 3, 6, 9


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options` of a request; other fields are ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@dataclass(frozen=True, slots=True)
class OnlineRequest:
    """One request; `body` is the JSON for the engine.

    `stream` is set if the answer is streamed. `prompt_tokens` is the prompt's estimated length.
    `tokens` is that plus the longest answer, if the answer has a limit. `text_is_answer`: its text
    is published while it is written. `sequences` is the number that the engine runs for it.
    `background`: the caller does not wait for the answer.
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
    background: bool = False


def read(url: str, raw: bytes, highest_priority: int) -> OnlineRequest:
    """Read a body; `highest_priority` is the smallest priority number that its caller may use.

    Raises ApiError or RequestRejected, naming the field and a valid value.
    """
    body = _read_object(raw)
    fields = len(body)
    stream = _take_stream(url, body)
    background = url == RESPONSES_URL and _take_background(body, stream)
    priority = _take_priority(body, LATER if background else URGENT)
    checked = check_body(url, body, "")
    prompt_tokens = estimated_tokens(len(raw))
    return OnlineRequest(
        url,
        raw if checked is body and len(body) == fields else encode(checked),
        checked.get("model"),
        min(LOWEST, max(highest_priority, priority)),
        stream,
        prompt_tokens + _max_answer_tokens(url, checked),
        prompt_tokens,
        text_is_answer(url, checked),
        sequences_of(checked),
        background,
    )


def with_model(asked: OnlineRequest, model: str) -> OnlineRequest:
    """Return a request that names no model with this model in its body."""
    return replace(asked, body=encode(decode(asked.body) | {"model": model}), model=model)


def _read_object(raw: bytes) -> dict[str, Any]:
    try:
        body = decode(raw)
    except RequestRejected as error:
        message = error.message.partition("; write one JSON")[0]
        raise ApiError(400, f"the body is {message}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def _take_stream(url: str, body: dict[str, Any]) -> StreamOptions | None:
    """Remove the fields about streaming from the body; return None if it is not streamed."""
    stream, options = body.pop("stream", None), body.pop("stream_options", None)
    if stream is not None and not isinstance(stream, bool):
        raise invalid("`stream` must be true or false", "stream")
    if not stream:
        if options is not None:
            raise invalid("`stream_options` needs `stream: true`; remove it", "stream_options")
        return None
    if url not in LIMITS:
        raise invalid(f"{url} has no streamed answers; remove `stream`", "stream")
    try:
        return msgspec.convert(options or {}, StreamOptions)
    except msgspec.ValidationError as error:
        raise invalid(f"`stream_options`: {error}", "stream_options") from None


def _take_background(body: dict[str, Any], stream: StreamOptions | None) -> bool:
    """Remove `background` from the body, and `store` if it is true; return whether it is true."""
    background = body.get("background")
    if background is not None and not isinstance(background, bool):
        raise invalid("`background` must be true or false", "background")
    if not background:
        return False
    if stream is not None:
        raise invalid(
            "a background response has no stream here; remove `stream`, and retrieve the response "
            "(GET /v1/responses/ID) until it has ended", "stream",
        )  # fmt: skip
    store = body.get("store")
    if store is not None and store is not True:
        raise invalid("`background: true` needs `store: true`; remove `store`", "store")
    del body["background"]
    body.pop("store", None)
    return True


def _take_priority(body: dict[str, Any], default: int) -> int:
    """Remove vLLM's `priority` from the body; return it, or that of OpenAI's service tier."""
    priority = int_if_whole(body.get("priority"))
    if type(priority) is int:  # `check_body` refuses anything else
        del body["priority"]
        return max(URGENT, priority)
    return FLEX if body.get("service_tier") == "flex" else default


def _max_answer_tokens(url: str, body: dict[str, Any]) -> int:
    """Return the most tokens of all answers to a request; 0 without a limit."""
    limits = [body[name] for name in LIMITS.get(url, ()) if body.get(name) is not None]
    prompt, prompts = body.get("prompt"), 1
    # A list of texts, or of lists of token ids, has several prompts; a list of integers is one.
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = len(prompt)
    return min(limits, default=0) * (body.get("n") or 1) * prompts
