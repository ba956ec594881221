"""A collector of spans on this machine, by OTLP over HTTP, for tests."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

TIMEOUT_S = 60.0


class Collector:
    """What came, whoever sent it, and where to send it."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self.resources: list[ResourceSpans] = []
        self._changed = threading.Condition()

    def take(self, resources: list[ResourceSpans]) -> None:
        with self._changed:
            self.resources += resources
            self._changed.notify_all()

    def spans(self, name: str) -> list[Span]:
        return [
            span
            for resource in self.resources
            for scope in resource.scope_spans
            for span in scope.spans
            if span.name == name
        ]

    def wait_for(self, come: Callable[[], bool]) -> None:
        """Until what has come is enough."""
        with self._changed:
            assert self._changed.wait_for(come, TIMEOUT_S), f"{len(self.resources)} batches came"


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Type"] == "application/json":  # as Triton sends them
                found.take(_from_json(json.loads(body)))
            else:
                found.take(list(ExportTraceServiceRequest.FromString(body).resource_spans))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _from_json(message: dict[str, Any]) -> list[ResourceSpans]:
    """Names and ids only; those are in hexadecimal, unlike bytes in other JSON of protocol buffers."""
    spans = [
        Span(
            name=span["name"],
            trace_id=bytes.fromhex(span["traceId"]),
            span_id=bytes.fromhex(span["spanId"]),
            parent_span_id=bytes.fromhex(span.get("parentSpanId", "")),
        )
        for resource in message["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    return [ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])]


def attributes(span: Span) -> dict[str, Any]:
    """Of a span or an event, by name."""
    found: dict[str, Any] = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found
