"""A server that takes spans by OTLP, over HTTP or gRPC, and keeps them: what a collector would get.

Its messages are those of opentelemetry-proto, so what an exporter sends must be read by them.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

from demo.stack import eventually


@dataclass(frozen=True)
class Received:
    """One span as it came; ids are hex, '' for none; `links` are (trace id, span id)."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    failed: bool
    seconds: float
    pid: int


def _value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    value = getattr(any_value, kind) if kind else None
    return [_value(one) for one in value.values] if kind == "array_value" else value


def _spans(request: Any) -> Iterator[Received]:
    for group in request.resource_spans:
        resource = {one.key: _value(one.value) for one in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Received(
                    resource.get("service.name", ""), span.name, span.kind, span.trace_id.hex(),
                    span.span_id.hex(), span.parent_span_id.hex(),
                    {one.key: _value(one.value) for one in span.attributes},
                    [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    span.status.code == 2,
                    (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                    resource.get("process.pid", 0),
                )  # fmt: skip


class Receiver:
    """What has come so far; `environment` tells an exporter where to send."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.environment: dict[str, str] = {}

    def take(self, request: Any) -> Any:
        """Keep a request's spans; return the answer."""
        self.spans += _spans(request)
        return messages.ExportTraceServiceResponse()

    def named(self, beginning: str) -> list[Received]:
        """Return the spans whose names begin so."""
        return [span for span in self.spans if span.name.startswith(beginning)]

    def wait_for(self, beginning: str, count: int = 1, timeout_s: float = 30) -> list[Received]:
        """Return the spans of such names as soon as there are so many."""

        def look() -> list[Received] | None:
            found = self.named(beginning)
            return found if len(found) >= count else None

        return list(eventually(look, timeout_s, f"{count} spans {beginning!r} have come"))


def _handler(take: Callable[[Any], Any]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                raw = gzip.decompress(raw)
            answer = take(messages.ExportTraceServiceRequest.FromString(raw)).SerializeToString()
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


@contextmanager
def otlp_receiver(protocol: str = "http/protobuf") -> Iterator[Receiver]:
    """Receive on a free port while the block runs."""
    receiver = Receiver()
    if protocol == "grpc":
        with ThreadPoolExecutor(2) as pool:
            server = grpc.server(pool)

            class Servicer(services.TraceServiceServicer):
                def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                    return receiver.take(request)

            services.add_TraceServiceServicer_to_server(Servicer(), server)
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            receiver.environment = _environment(port, protocol)
            try:
                yield receiver
            finally:
                server.stop(0).wait()
        return
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(receiver.take))
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    receiver.environment = _environment(http.server_port, protocol)
    try:
        yield receiver
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def _environment(port: int, protocol: str) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
