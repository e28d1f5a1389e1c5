"""A span as this project describes it, in the terms of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from contract.traces.context import SpanContext

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
