"""What a process that traces exports, and how it decides what that is.

Spans are described when they have ended, with ids that were given out before: whether one failed is
known then, and failed ones are kept whatever the ratio said. One that is not kept costs nothing.
With OpenTelemetry's own start_span every request would have a span, and one takes 20 us of CPU; one
described here takes 6 (exporting.py), and a request that is not sampled 0.2.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from zlib import crc32

from contract.traces.span import Span, SpanContext, new_context


class Exporting(Protocol):
    """Takes spans to where they are collected."""

    def put(self, span: Span) -> None:
        """Take a span; returns at once, and drops it if nobody has fetched too many before."""

    def close(self) -> None:
        """Send what is left, but wait no longer than a bound for that."""


class Tracer:
    """What one process traces: `ratio` of its requests, 0 to 1, and all that fail."""

    def __init__(self, ratio: float, exporting: Exporting) -> None:
        self._below = round(ratio * 2**32)
        self._exporting = exporting

    def samples(self, name: str) -> bool:
        """Say whether the ratio takes the request of this name; the same in every process."""
        return crc32(name.encode(errors="replace")) < self._below

    def begin(self, parent: SpanContext | None, name: str) -> SpanContext:
        """Return the context of a span that begins: as its parent says, else by the ratio."""
        if parent is not None:
            return parent.child()
        return new_context(sampled=self.samples(name), name=name)

    def put(self, span: Span) -> None:
        """Export a span if it is sampled, or failed."""
        if span.context.sampled or span.error:
            self._exporting.put(span)

    def put_whole(self, span: Span) -> None:
        """Export a span of a trace that is kept as a whole."""
        self._exporting.put(span)

    def close(self) -> None:
        """Send what is left, within a bound."""
        self._exporting.close()


_tracers: list[Tracer] = []


def tracer() -> Tracer | None:
    """Return this process' tracer; None if it does not trace."""
    return _tracers[-1] if _tracers else None


@contextmanager
def tracing(ratio: float | None, service: str) -> Iterator[Tracer | None]:
    """Trace while the block runs, as `service`; with None do nothing.

    Raises:
        SettingsError: OpenTelemetry's packages are missing, or its variables are wrong.
    """
    if ratio is None:
        yield None
        return
    from contract.traces.exporting import OtlpExport  # noqa: PLC0415 - loads OpenTelemetry's SDK

    made = Tracer(ratio, OtlpExport(service))
    _tracers.append(made)
    try:
        yield made
    finally:
        _tracers.remove(made)
        made.close()


def now() -> int:
    """Return the time as spans have it."""
    return time.time_ns()
