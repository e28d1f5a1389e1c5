"""Spans by OTLP: OpenTelemetry's SDK with its exporters, told by the standard's own variables."""

from __future__ import annotations

import os
import threading
import uuid

from contract.settings import SettingsError
from contract.traces.span import Span, SpanContext
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
        f"WARMQ_TRACES needs OpenTelemetry's SDK ({error}): install warmq with its extra, "
        "pip install 'warmq[traces]', or unset it"
    ) from None

#: How long a process that ends waits for a collector that is slow or away.
CLOSE_S = 2.0
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def _exporter() -> SpanExporter:
    """Return the exporter of the protocol that is asked for; endpoint, headers, certificates and
    timeouts it reads itself.

    Raises:
        SettingsError: the protocol is none, or its package is missing.
    """
    # The standard's variables, which belong to no setting of ours.
    name, protocol = next(
        ((one, told) for one in PROTOCOLS if (told := os.environ.get(one))), ("", "http/protobuf")
    )
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter as Grpc,
            )

            return Grpc()
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter as Http,
            )

            return Http()
    except ImportError as error:
        raise SettingsError(
            f"WARMQ_TRACES: the exporter for {protocol} is missing ({error}): install warmq with "
            "its extra, pip install 'warmq[traces]'"
        ) from None
    raise SettingsError(f"{name} is {protocol!r}; give http/protobuf or grpc")


class OtlpExport:
    """Sends spans from a thread of its own, some hundred at a time.

    It is also the process' provider: what other libraries trace, as vLLM does its requests, is sent
    with ours where it belongs to a trace that is sampled.
    """

    def __init__(self, service: str) -> None:
        mine: dict[str, str | int] = {
            "service.name": service,
            "service.version": version(),
            "service.instance.id": str(uuid.uuid4()),
            "process.pid": os.getpid(),
        }
        named = os.environ.get("OTEL_SERVICE_NAME")
        self._resource = Resource.create(mine | ({"service.name": named} if named else {}))
        self._scope = InstrumentationScope("warmq", version())
        self._processor = BatchSpanProcessor(_exporter())
        # Not at exit: that would wait for half a minute where the collector is away.
        provider = TracerProvider(
            sampler=ParentBased(ALWAYS_OFF), resource=self._resource, shutdown_on_exit=False
        )
        provider.add_span_processor(self._processor)
        api.set_tracer_provider(provider)

    def put(self, span: Span) -> None:
        """Take a span; returns at once, and drops it if thousands wait to be sent."""
        attributes = dict(span.attributes)
        status = api.Status(api.StatusCode.UNSET)
        if span.error:
            attributes["error.type"] = span.error
            status = api.Status(api.StatusCode.ERROR, span.error)
        self._processor.on_end(
            ReadableSpan(
                span.name,
                _theirs(span.context, sampled=True, remote=False),
                parent=_theirs(span.parent, sampled=True) if span.parent else None,
                resource=self._resource,
                attributes=attributes,
                links=[api.Link(_theirs(link)) for link in span.links],
                kind=api.SpanKind[span.kind.upper()],
                status=status,
                start_time=span.start,
                end_time=max(span.start, span.end),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send what is left; after CLOSE_S that is dropped, for nobody may wait for a collector."""
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_S)


def _theirs(
    context: SpanContext, *, sampled: bool | None = None, remote: bool = True
) -> api.SpanContext:
    flags = context.sampled if sampled is None else sampled
    state = api.TraceState.from_header([context.state]) if context.state else None
    return api.SpanContext(
        context.trace_id, context.span_id, remote, api.TraceFlags(int(flags)), state
    )
