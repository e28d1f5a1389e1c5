"""A span for each request that is sampled, or fails, from its lease to its result in Redis.

Of a request that came alone it continues the trace that its message names, as Celery clients with
OpenTelemetry write it, and the gateway. A request of a batch has a trace of its own, linked to the
batch's: a million children of one span no tool can show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from contract.message import Delivery
from contract.openai.body import CHAT_URL, COMPLETION_URL, MESSAGES_URL, RESPONSES_URL
from contract.openai.pooling import EMBEDDINGS_URL
from contract.traces import (
    Span,
    SpanContext,
    Tracer,
    Value,
    now,
    read_context,
    root_context,
    tracing,
)
from worker.drain.drain import Drain
from worker.drain.endings import Ending
from worker.drain.events import Committed, HandedBack, Leased, LeasesLost

#: Outcomes by which a request's span is exported whether it is sampled or not.
FAILURES = ("failed", "expired")
#: The conventions' names of what is done, by url.
OPERATIONS = {
    CHAT_URL: "chat",
    MESSAGES_URL: "chat",
    RESPONSES_URL: "chat",
    COMPLETION_URL: "text_completion",
    EMBEDDINGS_URL: "embeddings",
}
#: The same by the answer's `object`: of a Celery client's request the message has no url.
OPERATIONS_OF_ANSWERS = {"chat.completion": "chat", "text_completion": "text_completion"}


class Traces:
    """The spans of one drain's requests."""

    def __init__(self, drain: Drain, tracer: Tracer) -> None:
        self._tracer = tracer
        self._drain = drain
        self._queue = drain.settings.queue_to_drain
        #: Of sampled requests, by lease: their spans, and when those began.
        self._open: dict[str, tuple[SpanContext, int]] = {}
        drain.events.subscribe(Leased, self._leased)
        drain.events.subscribe(Committed, self._committed)
        drain.events.subscribe(HandedBack, self._handed_back)
        drain.events.subscribe(LeasesLost, self._lost)

    def _leased(self, event: Leased) -> None:
        began = now()
        for delivery in event.deliveries:
            # Most are of a batch and not sampled: for them no context is made.
            if delivery.batch and not self._tracer.samples(delivery.request_id):
                continue
            context = _context(self._tracer, delivery)
            if context.sampled:
                self._open[delivery.lease] = context, began
                delivery.trace = context.headers()

    def _committed(self, event: Committed) -> None:
        ended = now()
        for ending in event.endings:
            delivery, failure = ending.delivery, ending.outcome in FAILURES
            found = self._open.pop(delivery.lease, None) if self._open else None
            if not ending.outcome or (found is None and not failure):
                continue
            if found is None:
                took_s = ending.times.get("engine_s", 0.0)
                found = _context(self._tracer, delivery), ended - int(took_s * 1e9)
            attributes = self._attributes(delivery) | _of_ending(ending)
            error = _error(ending) if failure else ""
            self._put(delivery, found, ended, attributes, error)

    def _handed_back(self, event: HandedBack) -> None:
        ended = now()
        for delivery in event.deliveries:
            found = self._open.pop(delivery.lease, None)
            died = delivery.lease in event.died
            if found is None and not died:
                continue
            found = found or (_context(self._tracer, delivery), ended)
            attributes = self._attributes(delivery) | {"warmq.outcome": "handed_back"}
            self._put(delivery, found, ended, attributes, "engine_died" if died else "")

    def _lost(self, event: LeasesLost) -> None:
        ended = now()
        for delivery in event.deliveries:
            if found := self._open.pop(delivery.lease, None):
                attributes = self._attributes(delivery) | {"warmq.outcome": "lease_lost"}
                self._put(delivery, found, ended, attributes, "lease_lost")

    def _put(
        self,
        delivery: Delivery,
        begun: tuple[SpanContext, int],
        ended: int,
        attributes: dict[str, Value],
        error: str,
    ) -> None:
        context, began = begun
        named = _named(delivery)
        self._tracer.record(
            Span(
                f"process {self._queue}",
                "consumer",
                context,
                began,
                ended,
                None if delivery.batch else named,
                attributes,
                [named] if named is not None and delivery.batch else [],
                error,
            )
        )

    def _attributes(self, delivery: Delivery) -> dict[str, Value]:
        found: dict[str, Value] = {
            "messaging.system": "celery",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": self._queue,
            "messaging.message.id": delivery.request_id,
            "gen_ai.provider.name": self._drain.settings.engine,
            "gen_ai.request.model": self._drain.served,
            "warmq.attempt": delivery.attempt,
        }
        if operation := OPERATIONS.get(delivery.url or ""):
            found["gen_ai.operation.name"] = operation
        if delivery.batch:
            found["warmq.batch.id"] = delivery.batch
            found["warmq.custom_id"] = delivery.custom_id or ""
        return found


def _context(tracer: Tracer, delivery: Delivery) -> SpanContext:
    named = _named(delivery)
    if named is not None and not delivery.batch:
        return named.child()
    # Who made a batch and does not want it traced does not want its requests traced either.
    sampled = tracer.samples(delivery.request_id) and (named is None or named.sampled)
    # Each attempt at a request is in the same trace.
    return root_context(sampled=sampled, name=f"{delivery.life} {delivery.request_id}")


def _named(delivery: Delivery) -> SpanContext | None:
    """Return the context in the message: who asked for the request, or the batch's."""
    headers = delivery.headers
    return read_context(headers.get("traceparent"), headers.get("tracestate"))


def _of_ending(ending: Ending) -> dict[str, Value]:
    found: dict[str, Value] = {"warmq.outcome": ending.outcome}
    if "queued_s" in ending.times:
        found["warmq.queued_s"] = ending.times["queued_s"]
    if ending.outcome != "completed":
        return found
    found["gen_ai.usage.input_tokens"] = ending.prompt_tokens
    found["gen_ai.usage.output_tokens"] = ending.completion_tokens
    answer: dict[str, Any] = orjson.loads(ending.meta)["result"]
    if operation := OPERATIONS_OF_ANSWERS.get(answer.get("object", "")):
        found["gen_ai.operation.name"] = operation
    usage = answer.get("usage") or {}
    if cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
        found["gen_ai.usage.cache_read.input_tokens"] = int(cached)
    for name in ("id", "model"):
        if isinstance(told := answer.get(name), str):
            found[f"gen_ai.response.{name}"] = told
    choices = answer.get("choices")
    if isinstance(choices, list):
        found["gen_ai.response.finish_reasons"] = [
            str(choice.get("finish_reason")) for choice in choices
        ]
    return found


def _error(ending: Ending) -> str:
    error = orjson.loads(ending.meta)["warmq"]["error"] or {}
    return str(error.get("code") or ending.outcome)


@contextmanager
def traces(drain: Drain) -> Iterator[None]:
    """Trace a drain's requests while the block runs; without `traces` in its settings do nothing.

    Raises:
        SettingsError: OpenTelemetry's packages are missing, or its variables are wrong.
    """
    with tracing(drain.settings.traces, "warmq-worker") as tracer:
        if tracer is not None:
            Traces(drain, tracer)
        yield
