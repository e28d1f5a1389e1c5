"""The spans of a gateway: one for each request of its API, and one for each message it queues."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from contract.log_lines import set_log_fields
from contract.traces import Span, SpanContext, Tracer, now, read_context

#: Only these are traced: what probes and scrapers ask for would drown the rest.
_API = "/v1/"
_CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)


def current() -> Trace | None:
    """Return the trace of the request that is served; None if it is not traced."""
    return _CURRENT.get()


def current_traceparent() -> str:
    """Return the same as a header has it; '' if it is not traced."""
    trace = current()
    return trace.context.traceparent if trace is not None else ""


class TraceMiddleware:
    """Continues the trace that a request's headers name, or begins one, and exports its span."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if not scope["path"].startswith(_API):
            await self._app(scope, receive, send)
            return
        parent = _parent(scope)
        trace = Trace(self._tracer, parent, scope["warmq.request_id"])
        _CURRENT.set(trace)  # of the task that serves this request
        set_log_fields(trace_id=f"{trace.context.trace_id:032x}")
        began = now()
        try:
            await self._app(scope, receive, send)
        finally:
            status = scope.get("warmq.status", 0)  # 0: its caller went before there was an answer
            trace.error = str(status) if status >= 500 else ""
            trace.put(_span(scope, trace, parent, began, status))
            trace.end()


class Trace:
    """The trace of one request; its spans are kept until it is known whether it fails."""

    def __init__(self, tracer: Tracer, parent: SpanContext | None, name: str) -> None:
        self.context = tracer.child_or_root(parent, name)
        self.error = ""
        self._tracer = tracer
        self._spans: list[Span] = []

    def put(self, span: Span) -> None:
        """Keep a span that has ended."""
        self._spans.append(span)

    def queued(self, context: SpanContext, queue: str, request_id: str, began: int) -> None:
        """Keep the span of a message that Redis has now."""
        attributes = {
            "messaging.system": "celery",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": queue,
            "messaging.message.id": request_id,
        }
        name = f"send {queue}"
        self.put(Span(name, "producer", context, began, now(), self.context, attributes))

    def end(self) -> None:
        """Export the spans, if the trace is sampled or the request has failed."""
        if self.context.sampled or self.error:
            for span in self._spans:
                self._tracer.export(span)


def _parent(scope: Scope) -> SpanContext | None:
    headers = scope["warmq.headers"]
    parent, state = headers.get(b"traceparent"), headers.get(b"tracestate", b"")
    if parent is None:
        return None
    return read_context(parent.decode("latin-1"), state.decode("latin-1"))


def _span(scope: Scope, trace: Trace, parent: SpanContext | None, began: int, status: int) -> Span:
    method, route = scope["method"], getattr(scope.get("route"), "path", "")
    attributes = {
        "http.request.method": method,
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "warmq.request_id": scope["warmq.request_id"],
    }
    attributes |= {"http.route": route} if route else {}
    numbers = {"http.response.status_code": status} if status else {}
    name = f"{method} {route}" if route else method
    return Span(
        name, "server", trace.context, began, now(), parent, attributes | numbers, (), trace.error
    )
