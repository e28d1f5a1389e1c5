"""Defines the record of a background response, and the status that follows from it."""

from __future__ import annotations

import re
import secrets
from typing import Any, Literal

import msgspec

from contract.message import write_online
from contract.naming import turn_list
from contract.openai.body import RESPONSES_URL
from gateway.http.caller import Caller
from gateway.http.json_api import id_of
from gateway.online.request import OnlineRequest
from gateway.redis.responses import StoredResponse, request_id_of

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]
#: Seconds within which a response must end: OpenAI's window of a batch.
WINDOW_S = 86_400
#: Seconds after the deadline in which a worker's result may still come. Without one the response
#: has failed: no worker has taken its request.
GRACE_S = 600
#: Matches an id; no other text is looked up in Redis.
_ID = re.compile(r"resp_[0-9a-f]{24}")
#: Fields of a request that its response shows.
_SHOWN = (
    "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls",
    "prompt_cache_key", "reasoning", "service_tier", "temperature", "text", "tool_choice", "tools",
    "top_logprobs", "top_p", "truncation", "user",
)  # fmt: skip


class ResponseRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One background response. Times are in seconds since 1970.

    `shown` has the request's fields that the response shows. `trace` has the W3C headers of the
    trace that the worker continues.
    """

    id: str
    tenant: str
    created_at: int
    deadline: float
    model: str
    queue: str
    priority: int
    shown: dict[str, Any]
    sequences: int = 1
    trace: dict[str, str] | None = None

    @property
    def request_id(self) -> str:
        """The id of the request in the queue."""
        return request_id_of(self.id)

    @property
    def list_key(self) -> str:
        """The list into which the message is pushed."""
        return turn_list(self.queue, self.priority, self.tenant)

    def message(self, body: bytes, keep_ms: int) -> bytes:
        """Return the message of the request; `keep_ms` is the result's time to live."""
        return write_online(
            self.request_id, RESPONSES_URL, body, queue=self.queue, priority=self.priority,
            tenant=self.tenant, deadline=self.deadline, keep_ms=keep_ms, trace=self.trace,
            sequences=self.sequences,
        )  # fmt: skip


decode = msgspec.json.Decoder(ResponseRecord).decode
encode = msgspec.json.Encoder().encode


def new_record(
    asked: OnlineRequest, shown: dict[str, Any], caller: Caller, queue: str, *, now: float,
    idempotency: str = "", trace: dict[str, str] | None = None,
) -> ResponseRecord:  # fmt: skip
    """Return the record of a new response; its id is the same for each try with one key."""
    return ResponseRecord(
        id=id_for(caller, idempotency) if idempotency else f"resp_{secrets.token_hex(12)}",
        tenant=caller.tenant, created_at=int(now), deadline=now + WINDOW_S,
        model=asked.model or "default", queue=queue, priority=asked.priority,
        shown={name: shown[name] for name in _SHOWN if shown.get(name) is not None},
        sequences=asked.sequences, trace=trace,
    )  # fmt: skip


def id_for(caller: Caller, idempotency: str) -> str:
    """Return the id of the response that every try with one Idempotency-Key creates."""
    return id_of("resp_", f"response\0{caller.tenant}\0{idempotency}")


def is_id(text: str) -> bool:
    """Return whether a text may be the id of a background response."""
    return _ID.fullmatch(text) is not None


def is_lost(stored: StoredResponse, record: ResponseRecord, now: float) -> bool:
    """Return whether a response has no result although its deadline is long over."""
    return not stored.ended and now > record.deadline + GRACE_S
