"""How rates are told to clients: headers on each answer, and the refusal of what is too much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.redis.limits import Taken


class LimitReached(ApiError):
    """429 of a rate, with its headers: the SDKs wait for `retry-after` and try again."""

    def __init__(self, message: str, told: Mapping[str, str], **more: Any) -> None:
        super().__init__(429, message, code="rate_limit_exceeded", **more)
        self._told = told

    @property
    def headers(self) -> dict[str, str]:
        """Headers that say when to try again, and what is left."""
        return {**self._told, **super().headers}


def go_duration(ms: int) -> str:
    """Return a duration as Go writes it, which OpenAI's headers do: 12ms, 1.5s, 6m0s."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s" if minutes else (
        f"{seconds}s"
    )  # fmt: skip


def rate_headers(caller: Caller, taken: Taken) -> dict[str, str]:
    """Return the `x-ratelimit-*` headers of an answer, for what is limited."""
    found = {}
    for name, limit, left, full_ms in (
        ("requests", caller.requests_per_minute, taken.requests_left, taken.requests_full_ms),
        ("tokens", caller.tokens_per_minute, taken.tokens_left, taken.tokens_full_ms),
    ):
        if limit is not None:
            found[f"x-ratelimit-limit-{name}"] = str(limit)
            found[f"x-ratelimit-remaining-{name}"] = str(left)
            found[f"x-ratelimit-reset-{name}"] = go_duration(full_ms)
    return found


def too_fast(caller: Caller, tokens: int, taken: Taken, headers: Mapping[str, str]) -> LimitReached:
    """Return the refusal of a request: what it asked, what is left, when to try again."""
    if taken.wait_ms < 0:
        return LimitReached(
            f"Request too large: it asks for about {tokens} tokens, and the key's limit is "
            f"{caller.tokens_per_minute} a minute; send a shorter prompt or a smaller max_tokens",
            headers, retry=False, type="tokens",
        )  # fmt: skip
    parts = []
    if caller.requests_per_minute is not None:
        parts.append(f"{taken.requests_left} of {caller.requests_per_minute} requests")
    if caller.tokens_per_minute is not None:
        parts.append(
            f"{taken.tokens_left} of {caller.tokens_per_minute} tokens (asked: about {tokens})"
        )
    wait = go_duration(taken.wait_ms)
    return LimitReached(
        f"Rate limit reached: left of the key's minute are {' and '.join(parts)}; try again in "
        f"{wait}",
        {**headers, "retry-after-ms": str(taken.wait_ms)},
        after_s=taken.wait_ms / 1000 + 0.5,  # rounded up: at that time it is there
    )


def writes_too_fast(
    limit: int, what: str, wait_ms: int, headers: Mapping[str, str]
) -> LimitReached:
    """Return the refusal of a call that writes: the key's limit, and when to try again."""
    return LimitReached(
        f"Rate limit reached: a key may make {limit} {what} a minute; try again in "
        f"{go_duration(wait_ms)}",
        {**headers, "retry-after-ms": str(wait_ms)},
        after_s=wait_ms / 1000 + 0.5,
    )
