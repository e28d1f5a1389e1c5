"""Makes a gateway's spans: one for each API request and each queued message."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from contract.log_lines import set_log_fields
from contract.traces import Span, SpanContext, Tracer, now, read_context

#: Prefix of the paths that are traced; those of probes and scrapes are not.
_API = "/v1/"
_CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)


def current() -> Trace | None:
    """Return the trace of the current request; None if it is not traced."""
    return _CURRENT.get()


def current_traceparent() -> str:
    """Return the `traceparent` of the current request; '' if it is not traced."""
    trace = current()
    return trace.context.traceparent if trace is not None else ""


class TraceMiddleware:
    """Continues the trace in a request's headers, or begins one, and exports its span."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if not scope["path"].startswith(_API):
            await self._app(scope, receive, send)
            return
        headers, parent = scope["warmq.headers"], None
        if b"traceparent" in headers:
            values = (headers.get(name, b"") for name in (b"traceparent", b"tracestate"))
            parent = read_context(*(value.decode("latin-1") for value in values))
        trace = Trace(self._tracer, parent, scope["warmq.request_id"])
        _CURRENT.set(trace)
        set_log_fields(trace_id=f"{trace.context.trace_id:032x}")
        began = now()
        try:
            await self._app(scope, receive, send)
        finally:
            # The status is 0 if the client closed the connection before there was an answer.
            status = scope.get("warmq.status", 0)
            trace.end(_span(scope, trace.context, parent, began, status))


class Trace:
    """The trace of one request. Its spans are kept until the request has ended."""

    def __init__(self, tracer: Tracer, parent: SpanContext | None, name: str) -> None:
        self.context = tracer.child_or_root(parent, name)
        self._tracer = tracer
        self._spans: list[Span] = []

    def queued(self, context: SpanContext, queue: str, request_id: str, began: int) -> None:
        """Add the span of a message that is now in Redis."""
        attributes = {
            "messaging.system": "celery",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": queue,
            "messaging.message.id": request_id,
        }
        name = f"send {queue}"
        span = Span(name, "producer", context, began, now(), self.context, attributes)
        self._spans.append(span)

    def end(self, span: Span) -> None:
        """Export the spans of the request and its messages, if sampled or failed."""
        if self.context.sampled or span.error:
            for each in (*self._spans, span):
                self._tracer.export(each)


def _span(
    scope: Scope, context: SpanContext, parent: SpanContext | None, began: int, status: int
) -> Span:
    method, route = scope["method"], getattr(scope.get("route"), "path", "")
    attributes = {
        "http.request.method": method,
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "warmq.request_id": scope["warmq.request_id"],
        **({"http.route": route} if route else {}),
        **({"http.response.status_code": status} if status else {}),
    }
    name = f"{method} {route}" if route else method
    error = str(status) if status >= 500 else ""
    return Span(name, "server", context, began, now(), parent, attributes, (), error)
