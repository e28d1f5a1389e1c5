"""What an online request costs of its key's tokens a minute, however it has ended.

An answer says what it has used. Without one the prompt was read all the same, and text was
written: its bytes are the most tokens that it can have, and `max_tokens` is another bound.
"""

from __future__ import annotations

import msgspec

from contract.errors import RequestRejected
from contract.results import body_of, error_of, read_meta
from gateway.online.asked import Asked
from gateway.online.waiter import Waiter


class _Usage(msgspec.Struct):
    total_tokens: int | None = None
    input_tokens: int | None = None  # Anthropic's have no total
    output_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    count: int | None = None  # of /tokenize
    input_tokens: int | None = None  # of /v1/messages/count_tokens


_decode = msgspec.json.Decoder(_Answer).decode


def tokens_of(body: bytes) -> int | None:
    """Return how many tokens an answer says it has used; None if it says nothing."""
    try:
        answer = _decode(body)
    except msgspec.DecodeError:
        return None
    usage = answer.usage
    if usage is None:
        return answer.count if answer.count is not None else answer.input_tokens
    if usage.total_tokens is not None:
        return usage.total_tokens
    return (usage.input_tokens or 0) + (usage.output_tokens or 0)


def charged(asked: Asked, waiter: Waiter | None, body: bytes | None, *, goes_on: bool) -> int:
    """Return the tokens that a request has used, of prompt and answer.

    `body` is its answer, None if there was none; then with `goes_on` it is computed to its end
    although nobody waits. 0 if it was not run: it was not queued, or refused for what it asks.
    """
    meta = waiter.ending.result() if waiter is not None and waiter.has_result() else None
    if body is None and meta is not None:
        body = body_of(meta)  # its client went, or it was not the text that was sent
    if body is not None:
        used = tokens_of(body)
        return asked.prompt_tokens if used is None else used
    if waiter is None or not waiter.pushed or waiter.lost_store():
        return 0
    written, most = waiter.text_bytes, asked.tokens - asked.prompt_tokens
    if meta is not None:
        if not written and not _was_run(meta):
            return 0
    elif most and (goes_on or not asked.tells_text):
        written = most  # nobody can say how much of it was written
    return asked.prompt_tokens + (min(written, most) if most else written)


def _was_run(meta: bytes) -> bool:
    """Whether an engine had a request that failed; what it refuses has cost nothing."""
    timing = (read_meta(meta).get("warmq") or {}).get("timing")
    return bool(timing) and not isinstance(error_of(meta), RequestRejected)
