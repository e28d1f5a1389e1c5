"""Records OpenTelemetry spans of requests, from their lease to their result in Redis.

Requests that are sampled or fail have a span. A request without a batch continues the trace in its
message, which a Celery client with OpenTelemetry or the gateway wrote. A batch's request has its
own trace, with a link to the batch's span: no tool can show a million children of one span.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
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
    tracer,
    tracing,
)
from worker.drain.drain import Drain
from worker.drain.endings import Ending
from worker.drain.events import Committed, HandedBack, Leased, LeasesLost
from worker.settings import WorkerSettings

#: The outcomes of requests whose spans are recorded even if they are not sampled.
FAILURES = ("failed", "expired")
#: OpenTelemetry's `gen_ai.operation.name` by the request's url.
OPERATIONS = {
    CHAT_URL: "chat",
    MESSAGES_URL: "chat",
    RESPONSES_URL: "chat",
    COMPLETION_URL: "text_completion",
    EMBEDDINGS_URL: "embeddings",
}
#: OpenTelemetry's `gen_ai.operation.name` by the answer's `object`, for a Celery client's message,
#: which need not have a url.
OPERATIONS_OF_ANSWERS = {"chat.completion": "chat", "text_completion": "text_completion"}


class Traces:
    """Records the spans of one drain's requests."""

    def __init__(self, drain: Drain, tracer: Tracer) -> None:
        self._tracer = tracer
        self._drain = drain
        self._queue = drain.settings.queue_to_drain
        #: The span contexts and start times of sampled requests, by lease.
        self._open: dict[str, tuple[SpanContext, int]] = {}
        drain.events.subscribe(Leased, self._leased)
        drain.events.subscribe(Committed, self._committed)
        drain.events.subscribe(HandedBack, self._handed_back)
        drain.events.subscribe(LeasesLost, self._lost)

    def _leased(self, event: Leased) -> None:
        began = now()
        for delivery in event.deliveries:
            # Most requests are in a batch and not sampled: they need no context.
            if delivery.batch and not self._tracer.samples(delivery.request_id):
                continue
            context = _context(self._tracer, delivery)
            if context.sampled:
                self._open[delivery.lease] = context, began
                delivery.trace = context.headers()

    def _committed(self, event: Committed) -> None:
        ended = now()
        for ending in event.endings:
            delivery, failed = ending.delivery, ending.outcome in FAILURES
            opened = self._open.pop(delivery.lease, None) if self._open else None
            if not ending.outcome or (opened is None and not failed):
                continue
            if opened is None:
                engine_ns = int(ending.times.get("engine_s", 0.0) * 1e9)
                opened = _context(self._tracer, delivery), ended - engine_ns
            error = _error(ending) if failed else ""
            self._record(delivery, opened, ended, _of_ending(ending), error)

    def _handed_back(self, event: HandedBack) -> None:
        ended = now()
        for delivery in event.deliveries:
            opened = self._open.pop(delivery.lease, None)
            died = delivery.lease in event.died
            if opened or died:
                # The start of an unsampled request was not noted.
                opened = opened or (_context(self._tracer, delivery), ended)
                error = "engine_died" if died else ""
                self._record(delivery, opened, ended, {"warmq.outcome": "handed_back"}, error)

    def _lost(self, event: LeasesLost) -> None:
        ended = now()
        for delivery in event.deliveries:
            if opened := self._open.pop(delivery.lease, None):
                outcome: dict[str, Value] = {"warmq.outcome": "lease_lost"}
                self._record(delivery, opened, ended, outcome, "lease_lost")

    def _record(
        self,
        delivery: Delivery,
        opened: tuple[SpanContext, int],
        ended: int,
        attributes: dict[str, Value],
        error: str,
    ) -> None:
        cause = _context_in_message(delivery)
        of_batch = bool(delivery.batch)
        self._tracer.record(
            Span(
                f"process {self._queue}",
                "consumer",
                *opened,
                ended,
                None if of_batch else cause,
                self._attributes(delivery) | attributes,
                [cause] if cause is not None and of_batch else [],
                error,
            )
        )

    def _attributes(self, delivery: Delivery) -> dict[str, Value]:
        attributes: dict[str, Value] = {
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
            attributes["gen_ai.operation.name"] = operation
        if delivery.batch:
            attributes["warmq.batch.id"] = delivery.batch
            attributes["warmq.custom_id"] = delivery.custom_id or ""
        return attributes


def _context(tracer: Tracer, delivery: Delivery) -> SpanContext:
    cause = _context_in_message(delivery)
    if cause is not None and not delivery.batch:
        return cause.child()
    # If the batch's span is not sampled, the spans of its requests are not, either.
    sampled = tracer.samples(delivery.request_id) and (cause is None or cause.sampled)
    # All attempts at a request have the same name, so that their spans are in one trace. `life`
    # tells a batch from a deleted one of the same id.
    return root_context(sampled=sampled, name=f"{delivery.life} {delivery.request_id}")


def _context_in_message(delivery: Delivery) -> SpanContext | None:
    """Return the span context in the message: the caller's, or that of the batch."""
    headers = delivery.headers
    return read_context(headers.get("traceparent"), headers.get("tracestate"))


def _of_ending(ending: Ending) -> dict[str, Value]:
    attributes: dict[str, Value] = {"warmq.outcome": ending.outcome}
    if "queued_s" in ending.times:
        attributes["warmq.queued_s"] = ending.times["queued_s"]
    if ending.outcome != "completed":
        return attributes
    attributes["gen_ai.usage.input_tokens"] = ending.prompt_tokens
    attributes["gen_ai.usage.output_tokens"] = ending.completion_tokens
    answer: dict[str, Any] = orjson.loads(ending.meta)["result"]
    if operation := OPERATIONS_OF_ANSWERS.get(answer.get("object", "")):
        attributes["gen_ai.operation.name"] = operation
    usage = answer.get("usage") or {}
    if cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
        attributes["gen_ai.usage.cache_read.input_tokens"] = int(cached)
    for name in ("id", "model"):
        if isinstance(value := answer.get(name), str):
            attributes[f"gen_ai.response.{name}"] = value
    if isinstance(choices := answer.get("choices"), list):
        reasons = [str(choice.get("finish_reason")) for choice in choices]
        attributes["gen_ai.response.finish_reasons"] = reasons
    return attributes


def _error(ending: Ending) -> str:
    error = orjson.loads(ending.meta)["warmq"]["error"] or {}
    return str(error.get("code") or ending.outcome)


def traces(settings: WorkerSettings) -> AbstractContextManager[Tracer | None]:
    """Export spans of this process while in the context, if WARMQ_TRACES is set.

    A process may enter this context once: OpenTelemetry's tracer provider can be set once.

    Raises:
        SettingsError: OpenTelemetry's packages are missing, or its environment variables are wrong.
    """
    return tracing(settings.traces, "warmq-worker")


def trace_requests(drain: Drain) -> None:
    """Record spans of a drain's requests, if this process exports spans."""
    if (process_tracer := tracer()) is not None:
        Traces(drain, process_tracer)
