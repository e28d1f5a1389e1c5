"""Online requests of keys with rates: refused when too many, else corrected to what they used."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.errors import WarmqError
from producer.gateway.caller import Caller
from producer.gateway.errors import ApiError, of_warmq
from producer.gateway.idempotency import ATTACHING, replaying, whole_body
from producer.gateway.limits import Limits, estimated_tokens
from producer.gateway.refusal import refuse

#: Tokens of an answer whose request says no limit: what most answers have at most.
DEFAULT_ANSWER = 512
#: An image or a recording in a body: its bytes say little about its tokens.
_MEDIA = re.compile(rb"base64,[A-Za-z0-9+/=_-]{100,}")
MEDIA_TOKENS = 1000
#: The counts at an answer's end, in OpenAI's form and in Anthropic's. In a text they would stand
#: between escaped quotes.
_TOTAL = re.compile(rb'"total_tokens":\s?(\d+)')
_PARTS = re.compile(rb'"(input_tokens|output_tokens)":\s?(\d+)')
#: So much of an answer's end has them.
_TAIL = 2048
_GENERATING = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
)


class _Asked(msgspec.Struct):
    """What of a body decides how many tokens it may cost."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None


_decode = msgspec.json.Decoder(_Asked).decode


def tokens_of(path: str, body: bytes, limit: int) -> int:
    """Return about how many tokens a request asks for: its prompt and its longest answer.

    One that names no longest answer is never too large for the minute's `limit` because of it.
    """
    media = _MEDIA.findall(body)
    prompt = estimated_tokens(len(body) - sum(map(len, media))) + MEDIA_TOKENS * len(media)
    if path not in _GENERATING:
        return prompt
    try:
        asked = _decode(body)
    except msgspec.MsgspecError:
        return prompt  # whoever reads it says what is wrong
    named = asked.max_completion_tokens or asked.max_tokens or asked.max_output_tokens
    choices = max(1, asked.n or 1)
    if named is not None:
        return prompt + choices * max(0, named)
    return max(prompt, min(limit, prompt + choices * DEFAULT_ANSWER))


def tokens_used(tail: bytes) -> int | None:
    """Return the tokens that an answer's end tells; None if it tells none."""
    if total := _TOTAL.findall(tail):
        return int(total[-1])
    parts = {name: int(count) for name, count in _PARTS.findall(tail)}
    return sum(parts.values()) if parts else None


class Metering:
    """Takes each online request of the rates of its key, if that has any."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            caller: Caller = scope["warmq.caller"]
            limited = caller.requests_per_minute is not None or caller.tokens_per_minute is not None
            if limited and scope["method"] == "POST" and scope["path"] in ATTACHING:
                await self._metered(caller, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _metered(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        tokens = 0
        try:
            if caller.tokens_per_minute is not None:
                body = await whole_body(receive)
                if body is None:  # the client has gone
                    return
                tokens = tokens_of(scope["path"], body, caller.tokens_per_minute)
                receive = replaying(body, receive)
            allowed = await self._limits.check_online(caller, tokens)
        except (ApiError, WarmqError) as error:
            told = error if isinstance(error, ApiError) else of_warmq(error)
            await refuse(scope, receive, send, told)
            return
        headers = [(name.encode(), value.encode()) for name, value in allowed.headers.items()]
        status, tail = 0, b""

        async def look(message: Message) -> None:
            nonlocal status, tail
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *headers]
            else:
                tail = (tail + message.get("body", b"")[-_TAIL:])[-_TAIL:]
            await send(message)

        try:
            await self._app(scope, receive, look)
        finally:
            used: Any = 0 if status >= 400 else tokens_used(tail)
            # A streamed answer that tells no usage counts as estimated, as one that was cut off.
            allowed.settle(tokens if used is None else used)
