"""Exports spans by OTLP, with OpenTelemetry's SDK and its environment variables."""

from __future__ import annotations

import os
import threading
import uuid
from pkgutil import resolve_name

from contract.settings import SettingsError
from contract.traces import Span, SpanContext
from contract.version import version

try:
    from opentelemetry import trace as api
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
except ImportError as error:
    raise SettingsError(
        f"WARMQ_TRACES needs OpenTelemetry's SDK ({error}): install it with "
        "pip install 'warmq[traces]', or unset WARMQ_TRACES"
    ) from None

#: Most seconds that the process waits for the collector when it ends.
CLOSE_S = 2.0
#: OpenTelemetry's environment variables that name the protocol; the first that is set counts.
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
#: The exporter classes by protocol.
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter:OTLPSpanExporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter:OTLPSpanExporter",
}


def _exporter() -> SpanExporter:
    """Return an exporter for the configured protocol; it reads OpenTelemetry's other variables."""
    name, protocol = next(
        ((one, os.environ[one]) for one in PROTOCOLS if os.environ.get(one)),
        ("", "http/protobuf"),
    )
    if protocol not in EXPORTERS:
        raise SettingsError(f"{name} is {protocol!r}; give http/protobuf or grpc")
    try:
        exporter: type[SpanExporter] = resolve_name(EXPORTERS[protocol])
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"WARMQ_TRACES: the exporter for {protocol} is missing ({error}): install it with "
            "pip install 'warmq[traces]'"
        ) from None
    return exporter()


class OtlpExporter:
    """Sends spans in groups from its own thread.

    The exporter also sets OpenTelemetry's tracer provider of the process, so that spans of other
    libraries, for example vLLM, are sent if their trace is sampled.
    """

    def __init__(self, service: str) -> None:
        self._resource = Resource.create({
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or service,
            "service.version": version(),
            "service.instance.id": str(uuid.uuid4()),
            "process.pid": os.getpid(),
        })  # fmt: skip
        self._scope = InstrumentationScope("warmq", version())
        self._processor = BatchSpanProcessor(_exporter())
        # Without shutdown_on_exit=False, the exit would wait 30 s for an unreachable collector.
        provider = TracerProvider(
            sampler=ParentBased(ALWAYS_OFF), resource=self._resource, shutdown_on_exit=False
        )
        provider.add_span_processor(self._processor)
        api.set_tracer_provider(provider)

    def export(self, span: Span) -> None:
        """Queue a span and return immediately; drop it if thousands wait to be sent."""
        attributes = dict(span.attributes)
        status = api.Status(api.StatusCode.UNSET)
        if span.error:
            attributes["error.type"] = span.error
            status = api.Status(api.StatusCode.ERROR, span.error)
        self._processor.on_end(
            ReadableSpan(
                span.name,
                _sdk_context(span.context, sampled=True, remote=False),
                parent=_sdk_context(span.parent, sampled=True) if span.parent else None,
                resource=self._resource,
                attributes=attributes,
                links=[api.Link(_sdk_context(link, sampled=link.sampled)) for link in span.links],
                kind=api.SpanKind[span.kind.upper()],
                status=status,
                start_time=span.start,
                end_time=max(span.start, span.end),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send the queued spans; drop those that are not sent after CLOSE_S."""
        thread = threading.Thread(target=self._processor.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def _sdk_context(context: SpanContext, *, sampled: bool, remote: bool = True) -> api.SpanContext:
    state = api.TraceState.from_header([context.state]) if context.state else None
    flags = api.TraceFlags(int(sampled))
    return api.SpanContext(context.trace_id, context.span_id, remote, flags, state)
