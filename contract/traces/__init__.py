"""Reads and writes W3C trace contexts, which messages carry, and records this process's spans.

OpenTelemetry's packages are imported only by `tracing` (contract/traces/otlp.py).

A span is created when it has ended, with ids that were made before. By then it is known whether the
span failed, and failed spans are exported whatever the sampling ratio. A span takes 6 µs of CPU
time; one by OpenTelemetry's start_span takes 20 µs. A request that is not sampled takes 0.2 µs.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import getrandbits
from typing import Literal
from zlib import crc32

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
#: Most characters of a tracestate; W3C allows to drop a longer one.
_MAX_STATE = 512

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The ids of one span; `sampled`: its trace is exported. `state` is W3C's tracestate."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The value of the W3C header `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    def headers(self) -> dict[str, str]:
        """Return the W3C headers with which a message or request passes the context on."""
        state = {"tracestate": self.state} if self.state else {}
        return {"traceparent": self.traceparent} | state

    def child(self) -> SpanContext:
        """Return the context of a new span in this trace."""
        return SpanContext(self.trace_id, _new_id(64), self.sampled, self.state)


def root_context(*, sampled: bool, name: str = "") -> SpanContext:
    """Return the context of a trace's first span; the same `name` gives the same trace id."""
    trace_id = _new_id(128)
    if name:
        digest = hashlib.blake2b(name.encode(errors="replace"), digest_size=16).digest()
        trace_id = int.from_bytes(digest, "big") or 1
    return SpanContext(trace_id, _new_id(64), sampled)


def read_context(traceparent: object, tracestate: object = "") -> SpanContext | None:
    """Return the context in these headers; None if there is no valid one."""
    if not isinstance(traceparent, str):
        return None
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id, flags = (int(found[n], 16) for n in (2, 3, 4))
    if not (trace_id and span_id):
        return None
    valid = isinstance(tracestate, str) and len(tracestate) <= _MAX_STATE
    state = str(tracestate) if valid and str(tracestate).isprintable() else ""
    return SpanContext(trace_id, span_id, bool(flags & 1), state)


def _new_id(bits: int) -> int:
    return getrandbits(bits) or 1


@dataclass(frozen=True, slots=True)
class Span:
    """A span that has ended; `start` and `end` are in ns since 1970.

    `error` is the reason of a failure, a short code without any text of a prompt; '' for none.
    """

    name: str
    kind: Kind
    context: SpanContext
    start: int
    end: int
    parent: SpanContext | None = None
    attributes: Mapping[str, Value] = field(default_factory=dict)
    links: Sequence[SpanContext] = ()
    error: str = ""


class Tracer:
    """Samples the share `ratio` (0 to 1) of requests, and exports spans.

    `export` returns immediately, and drops a span if thousands wait to be sent. It does not check
    whether the span is sampled; `record` does.
    """

    def __init__(self, ratio: float, export: Callable[[Span], None]) -> None:
        self._below = round(ratio * 2**32)
        self.export = export

    def samples(self, name: str) -> bool:
        """Return whether the request `name` is sampled; each process returns the same."""
        return crc32(name.encode(errors="replace")) < self._below

    def child_or_root(self, parent: SpanContext | None, name: str) -> SpanContext:
        """Return a new span's context: a child of `parent`, or the root of a new trace."""
        if parent is not None:
            return parent.child()
        return root_context(sampled=self.samples(name), name=name)

    def record(self, span: Span) -> None:
        """Export a span if it is sampled or has failed."""
        if span.context.sampled or span.error:
            self.export(span)


_tracers: list[Tracer] = []


def tracer() -> Tracer | None:
    """Return this process's tracer; None if WARMQ_TRACES is not set."""
    return _tracers[-1] if _tracers else None


@contextmanager
def tracing(ratio: float | None, service: str) -> Iterator[Tracer | None]:
    """Export spans of the process named `service` while in the context; not if `ratio` is None.

    Raises:
        SettingsError: OpenTelemetry's packages are missing, or its environment variables are wrong.
    """
    if ratio is None:
        yield None
        return
    from contract.traces.otlp import OtlpExporter  # noqa: PLC0415 - loads OpenTelemetry's SDK

    exporter = OtlpExporter(service)
    made = Tracer(ratio, exporter.export)
    _tracers.append(made)
    try:
        yield made
    finally:
        _tracers.remove(made)
        exporter.close()


def now() -> int:
    """Return the time in ns since 1970, for `start` and `end` of a span."""
    return time.time_ns()
