"""Spans in OpenTelemetry's terms, and where one stands: W3C's `traceparent` and `tracestate`.

Without OpenTelemetry's packages: logs and messages have contexts where nothing is exported.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import Literal

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
#: W3C lets a longer state be dropped.
_LONGEST_STATE = 512


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The ids of one span; `sampled` says whether those of its trace are exported.

    `state` is what other vendors' tracers want handed on.
    """

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The context as a header has it."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    def headers(self) -> dict[str, str]:
        """Return the headers that hand it on."""
        found = {"traceparent": self.traceparent}
        if self.state:
            found["tracestate"] = self.state
        return found

    def child(self) -> SpanContext:
        """Return the context of a new span of this trace."""
        return SpanContext(self.trace_id, _new_id(64), self.sampled, self.state)


def new_context(*, sampled: bool, name: str = "") -> SpanContext:
    """Return the context of a new trace's first span; one `name` always gets the same trace."""
    trace_id = _new_id(128)
    if name:
        digest = hashlib.blake2b(name.encode(errors="replace"), digest_size=16).digest()
        trace_id = int.from_bytes(digest, "big") or 1
    return SpanContext(trace_id, _new_id(64), sampled)


def read_context(traceparent: object, tracestate: object = "") -> SpanContext | None:
    """Return the context that headers hand on; None if they hand on none that is valid."""
    if not isinstance(traceparent, str) or not (found := _FORM.fullmatch(traceparent.strip())):
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if (
        version == "ff"
        or (version == "00" and more)
        or not (int(trace_id, 16) and int(span_id, 16))
    ):
        return None
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1), _state(tracestate)
    )


def _state(text: object) -> str:
    kept = isinstance(text, str) and len(text) <= _LONGEST_STATE and text.isprintable()
    return str(text) if kept else ""


def _new_id(bits: int) -> int:
    return getrandbits(bits) or 1


Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True)
class Span:
    """A span that has ended; times are in ns since 1970. With `error` it failed, for that reason:
    a short word, no text that may have a prompt in it."""

    name: str
    kind: Kind
    context: SpanContext
    start: int
    end: int
    parent: SpanContext | None = None
    attributes: Mapping[str, Value] = field(default_factory=dict)
    links: Sequence[SpanContext] = ()
    error: str = ""
