"""Exports the spans of a batch's trace: submission, ordering, writing of results.

The batch's hash in Redis has the context of the first span, so that other processes can add spans
to the trace and link the spans of requests to it. The trace is not exported if the caller's
trace is not sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from contract.batch import Batch
from contract.traces import Span, SpanContext, Value, now, read_context, root_context, tracer

#: The field of a batch's hash that has this context.
FIELD = "traceparent"


def new_batch_fields(parent_traceparent: str) -> dict[str, str]:
    """Return the field with a new batch's trace; `parent_traceparent` is the caller's or ''."""
    if tracer() is None:
        return {}
    parent = read_context(parent_traceparent)
    context = parent.child() if parent is not None else root_context(sampled=True)
    return {FIELD: context.traceparent}


def _context(batch: Batch | None) -> SpanContext | None:
    return read_context(batch.fields.get(FIELD)) if batch is not None else None


def export_submission(batch: Batch, queue: str, parent_traceparent: str) -> None:
    """Export the first span: from the batch's creation until now."""
    tracing, context = tracer(), _context(batch)
    if tracing is None or context is None:
        return
    attributes = _attributes(batch, queue) | {
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.batch.message_count": batch.number("valid"),
    }
    parent = read_context(parent_traceparent)
    parent = parent if parent is not None and parent.trace_id == context.trace_id else None
    began = int(batch.created) * 1_000_000
    tracing.record(Span(f"send {queue}", "producer", context, began, now(), parent, attributes))


@contextmanager
def export_step(name: str, batch: Batch | None, queue: str) -> Iterator[None]:
    """Export a span for the block; the span fails with the block."""
    tracing, context = tracer(), _context(batch)
    if tracing is None or context is None or batch is None:
        yield
        return
    began, error = now(), ""
    try:
        yield
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        attributes = _attributes(batch, queue)
        tracing.record(
            Span(
                f"{name} {queue}", "internal", context.child(), began, now(), context, attributes,
                (), error,
            )
        )  # fmt: skip


def _attributes(batch: Batch, queue: str) -> dict[str, Value]:
    return {
        "messaging.system": "celery",
        "messaging.destination.name": queue,
        "warmq.batch.id": batch.id,
    }
