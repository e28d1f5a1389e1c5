"""The trace of a batch: its submission, the plan of its order, and the writing of its results.

The batch keeps the context of its first span, so that whoever goes on with it, in another process
or after a crash, adds to the same trace; those of its requests are linked to it. A batch's trace
is few spans, so it is exported whatever the ratio, unless whoever asked for it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from contract.batch import Batch
from contract.traces import Span, SpanContext, Value, now, read_context, root_context, tracer

FIELD = "traceparent"


def new_batch_fields(parent_traceparent: str) -> dict[str, str]:
    """Return what a new batch keeps; `parent_traceparent` is the caller's, or ''."""
    if tracer() is None:
        return {}
    parent = read_context(parent_traceparent)
    context = parent.child() if parent is not None else root_context(sampled=True)
    return {FIELD: context.traceparent}


def batch_context(batch: Batch) -> SpanContext | None:
    """Return where a batch's trace begins; None if whoever made it did not trace."""
    return read_context(batch.fields.get(FIELD))


def submitted(batch: Batch, queue: str, parent_traceparent: str) -> None:
    """Export the first span: from the batch's creation until it was sealed, which is now."""
    tracing, context = tracer(), batch_context(batch)
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
def step(name: str, batch: Batch | None, queue: str) -> Iterator[None]:
    """Export a span for what the block does for a batch; it fails with the block."""
    tracing, context = tracer(), batch_context(batch) if batch is not None else None
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
        named, own = f"{name} {queue}", context.child()
        attributes = _attributes(batch, queue)
        tracing.record(Span(named, "internal", own, began, now(), context, attributes, (), error))


def _attributes(batch: Batch, queue: str) -> dict[str, Value]:
    return {
        "messaging.system": "celery",
        "messaging.destination.name": queue,
        "warmq.batch.id": batch.id,
    }
